// A drawing as the network wants it: what `pcdeq predict` does to a picture, for a square one, light on black.

const round = (x) => (Math.abs(x % 1) === 0.5 ? 2 * Math.round(x / 2) : Math.round(x)); // ties to even, as Python's

// A drawing, ink from 0 to 255, as pixels from 0 to 1: contrast stretched, the ink scaled into 20 of 28 pixels, its
// centre of mass in the middle, as MNIST was made; null where there is no ink.
function prepare(ink, side, [height, width]) {
  const least = ink.reduce((a, b) => Math.min(a, b), 255), most = ink.reduce((a, b) => Math.max(a, b), 0);
  if (most === least) return null;
  const gain = 255 / (most - least), stretched = ink.map((value) => Math.trunc(value * gain - least * gain));
  let [left, top, right, bottom] = [side, side, -1, -1];
  stretched.forEach((value, at) => {
    if (value <= 64) return;
    const x = at % side, y = (at - x) / side;
    [left, top, right, bottom] = [Math.min(left, x), Math.min(top, y), Math.max(right, x), Math.max(bottom, y)];
  });
  if (right < 0) return null;
  const size = [bottom - top + 1, right - left + 1];
  const scale = Math.min((20 / 28) * width / size[1], (20 / 28) * height / size[0]);
  const [rows, columns] = size.map((edge) => Math.max(1, round(edge * scale)));
  const cut = Float64Array.from({ length: size[0] * size[1] }, (_, at) =>
    stretched[(top + Math.floor(at / size[1])) * side + left + (at % size[1])]);
  const small = shrink(shrink(cut, size[0], size[1], columns), columns, size[0], rows); // each also transposes
  const mass = small.reduce((a, b) => a + b, 0);
  const middle = (place) => small.reduce((sum, value, at) => sum + value * place(at), 0) / mass;
  const x0 = round(width / 2 - 0.5 - middle((at) => at % columns));
  const y0 = round(height / 2 - 0.5 - middle((at) => Math.floor(at / columns)));
  const pixels = new Float64Array(height * width);
  small.forEach((value, at) => {
    const x = x0 + (at % columns), y = y0 + Math.floor(at / columns);
    if (x >= 0 && x < width && y >= 0 && y < height) pixels[y * width + x] = value / 255;
  });
  return pixels;
}

// Rows of so many numbers, each brought to another length by Lanczos's window of 3; the result is transposed.
function shrink(image, rows, length, target) {
  const ratio = length / target, stretch = Math.max(ratio, 1), result = new Float64Array(rows * target);
  const sinc = (x) => (x ? Math.sin(Math.PI * x) / (Math.PI * x) : 1);
  for (let i = 0; i < target; i++) {
    const centre = (i + 0.5) * ratio;
    const first = Math.max(0, Math.trunc(centre - 3 * stretch + 0.5));
    const end = Math.min(length, Math.trunc(centre + 3 * stretch + 0.5));
    const window = Array.from({ length: end - first }, (_, j) => (first + j - centre + 0.5) / stretch);
    const weights = window.map((x) => (Math.abs(x) < 3 ? sinc(x) * sinc(x / 3) : 0));
    const total = weights.reduce((a, b) => a + b, 0);
    for (let row = 0; row < rows; row++) {
      const sum = weights.reduce((part, weight, j) => part + weight * image[row * length + first + j], 0);
      result[i * rows + row] = Math.min(Math.max(Math.round(sum / total), 0), 255);
    }
  }
  return result;
}
