// A drawing as the network wants it: what `pcdeq predict` does to a picture, for a square one, light on black.

const round = (x) => (Math.abs(x % 1) === 0.5 ? 2 * Math.round(x / 2) : Math.round(x)); // ties to even, as Python's

// A drawing, ink from 0 to 255, as pixels from 0 to 1: contrast stretched, the ink scaled into 20 of 28 pixels, its
// centre of mass in the middle, as MNIST was made; null where there is no ink.
function prepare(ink, side, [height, width]) {
  let least = 255, most = 0, [left, top, right, bottom] = [side, side, -1, -1];
  for (const value of ink) [least, most] = [Math.min(least, value), Math.max(most, value)];
  if (most === least) return null;
  const gain = 255 / (most - least);
  const stretched = Float64Array.from({ length: 256 }, (_, value) => Math.trunc(value * gain - least * gain));
  for (let y = 0, at = 0; y < side; y++) {
    for (let x = 0; x < side; x++, at++) {
      if (stretched[ink[at]] <= 64) continue;
      if (x < left) left = x;
      if (x > right) right = x;
      if (y < top) top = y;
      bottom = y;
    }
  }
  const size = [bottom - top + 1, right - left + 1];
  const scale = Math.min((20 / 28) * width / size[1], (20 / 28) * height / size[0]);
  const [rows, columns] = size.map((edge) => Math.max(1, round(edge * scale)));
  const cut = new Float64Array(size[0] * size[1]);
  for (let y = 0, at = 0; y < size[0]; y++) {
    for (let x = 0; x < size[1]; x++) cut[at++] = stretched[ink[(top + y) * side + left + x]];
  }
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
      let sum = 0;
      for (let j = 0; j < weights.length; j++) sum += weights[j] * image[row * length + first + j];
      result[i * rows + row] = Math.min(Math.max(Math.round(sum / total), 0), 255);
    }
  }
  return result;
}
