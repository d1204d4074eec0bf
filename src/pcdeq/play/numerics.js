// The whole network, in doubles: a picture becomes x, the layer settles to z = s(Wz + x), and z becomes scores.

// s: nonnegative, nondecreasing and concave on [0, ∞), and slower than any line; top is how high it gets.
const ACTIVATIONS = {
  tanh: { s: Math.tanh, top: 1 },
  softsign: { s: (y) => y / (1 + Math.abs(y)), top: 1 },
  relu6: { s: (y) => Math.min(Math.max(y, 0), 6), top: 6 },
  sigmoid: { s: (y) => 1 / (1 + Math.exp(-y)), top: 1 },
  log1p: { s: (y) => Math.log1p(Math.max(y, 0)), top: Infinity },
  arctan: { s: Math.atan, top: Math.PI / 2 },
  "1-exp": { s: (y) => -Math.expm1(-Math.max(y, 0)), top: 1 },
  isru: { s: (y) => y / Math.hypot(y, 1), top: 1 },
  "hard-tanh": { s: (y) => Math.min(Math.max(y, 0), 1), top: 1 },
  "hard-sigmoid": { s: (y) => Math.min(Math.max(y / 6 + 0.5, 0), 1), top: 1 },
};
const MOST_STEPS = 300; // bounds that have not met by then are bounds all the same
const WIDEST = 0.2; // the largest noise, in pixels that go from 0 to 1

// Numbers are stored as base64 of float32, as they were trained, or of float64, where they were computed.
function decode({ f4, f8 }) {
  const bytes = Uint8Array.from(atob(f4 ?? f8), (letter) => letter.charCodeAt(0));
  return f4 ? new Float32Array(bytes.buffer) : new Float64Array(bytes.buffer);
}

// before and after the equilibrium: affine layers, a matrix and a bias or a scale and a shift for each component.
function readNetwork({ activation, floor, weight, before, after }) {
  const affine = (layer) => Object.fromEntries(Object.entries(layer).map(([name, text]) => [name, decode(text)]));
  return { activation, floor, weight: decode(weight), before: before.map(affine), after: after.map(affine) };
}

// A box goes through Ax + b by its centre and its radius: A centre + b, |A| radius.
function through(layers, { centre, radius }) {
  for (const { weight, bias, scale, shift } of layers) {
    if (scale) {
      centre = centre.map((x, i) => scale[i % scale.length] * x + shift[i % shift.length]);
      radius = radius.map((r, i) => Math.abs(scale[i % scale.length]) * r);
      continue;
    }
    const next = [new Float64Array(bias.length), new Float64Array(bias.length)];
    for (let i = 0, at = 0; i < bias.length; i++) {
      let middle = bias[i], reach = 0;
      for (let j = 0; j < centre.length; j++, at++) {
        middle += weight[at] * centre[j];
        reach += Math.abs(weight[at]) * radius[j];
      }
      next[0][i] = middle;
      next[1][i] = reach;
    }
    [centre, radius] = next;
  }
  return { centre, radius };
}

const boxOf = (lower, upper) => ({
  centre: lower.map((low, i) => (low + upper[i]) / 2),
  radius: lower.map((low, i) => (upper[i] - low) / 2),
});

// x must be positive where s(0) = 0: log(1 + exp(5y)) / 5, which is y above 4, as in torch; else max(y, 0) will do.
function inject({ activation, floor }, y) {
  if (ACTIVATIONS[activation].s(0) > 0) return Math.max(y, 0) + floor;
  return (y > 4 ? y : Math.log1p(Math.exp(5 * y)) / 5) + floor;
}

// The least and the largest x of all pictures within the noise, pixels from 0 to 1.
function injected(network, pixels, noise) {
  const lower = Float64Array.from(pixels, (pixel) => Math.max(pixel - noise, 0));
  const upper = Float64Array.from(pixels, (pixel) => Math.min(pixel + noise, 1));
  const { centre, radius } = through(network.before, boxOf(lower, upper));
  return {
    lower: centre.map((y, i) => inject(network, y - radius[i])),
    upper: centre.map((y, i) => inject(network, y + radius[i])),
  };
}

// One step: s(Wz + x), the weights times a factor.
function step({ activation, weight }, z, x, factor) {
  const { s } = ACTIVATIONS[activation], next = new Float64Array(x.length);
  for (let i = 0, at = 0; i < x.length; i++) {
    let sum = 0;
    for (let j = 0; j < x.length; j++) sum += weight[at++] * z[j];
    next[i] = s(factor * sum + x[i]);
  }
  return next;
}

const change = (points) => points.at(-1).reduce((most, z, i) => Math.max(most, Math.abs(z - points.at(-2)[i])), 0);

// From 0, below every equilibrium, steps rise; from the top, above every one, they fall. Neither jumps over it, so that
// between lower[k] and upper[k] lies the equilibrium of every x in the box, at every step k.
function settle(network, x, factor = 1) {
  let { s, top } = ACTIVATIONS[network.activation];
  if (top === Infinity) {
    const above = (t) => step(network, new Float64Array(x.upper.length).fill(t), x.upper, factor).every((z) => z <= t);
    for (top = 1; !above(top); ) top *= 2;
  }
  const lower = [new Float64Array(x.lower.length)], upper = [new Float64Array(x.lower.length).fill(top)];
  do {
    lower.push(step(network, lower.at(-1), x.lower, factor));
    upper.push(step(network, upper.at(-1), x.upper, factor));
  } while (Math.max(change(lower), change(upper)) > 1e-14 * top && lower.length <= MOST_STEPS);
  return { lower, upper, top };
}

// The same layer without its constraint: three of five weights have a minus sign. Nothing promises that it settles.
function unconstrained(network) {
  const size = Math.sqrt(network.weight.length);
  const signed = (w, at) => ((2 * Math.floor(at / size) + 3 * (at % size)) % 5 < 3 ? -w : w);
  return { ...network, weight: network.weight.map(signed) };
}

function settlePlain(plain, x, factor, steps) {
  const points = [new Float64Array(x.length)];
  while (points.length <= steps) points.push(step(plain, points.at(-1), x, factor));
  return points;
}

// Scores in the middle of the box, the best of them, and how far each other can be ahead of it: from least to most.
// Where none can be ahead, by more than rounding, the class is proved for all of the box.
function judge(network, lower, upper) {
  const { centre, radius } = through(network.after.slice(0, -1), boxOf(lower, upper));
  const { weight, bias } = network.after.at(-1), inputs = centre.length;
  const scores = Array.from(through([{ weight, bias }], { centre, radius }).centre);
  const best = scores.indexOf(Math.max(...scores));
  const least = [], most = [];
  let size = 0; // of all that is summed, which rounding is relative to
  for (let k = 0, at = 0; k < scores.length; k++) {
    let reach = 0;
    for (let j = 0; j < inputs; j++, at++) {
      reach += Math.abs(weight[at] - weight[best * inputs + j]) * radius[j];
      size += Math.abs(weight[at] * centre[j]);
    }
    least.push(scores[k] - scores[best] - reach);
    most.push(scores[k] - scores[best] + reach);
  }
  const proved = most.every((ahead, k) => k === best || ahead < -1e-9 * size);
  return { scores, best, least, most, proved };
}

// What the network makes of a picture, and of all within the noise: every step, the verdict, when it was first proved.
function think(network, pixels, noise = 0, factor = 1) {
  const x = injected(network, pixels, noise), { lower, upper, top } = settle(network, x, factor);
  const verdict = judge(network, lower.at(-1), upper.at(-1));
  const provedAt = verdict.proved ? lower.findIndex((low, k) => judge(network, low, upper[k]).proved) : -1;
  return { x, lower, upper, top, verdict, provedAt };
}

// How much noise the proof bears: boxes lie in one another, so halving finds where it ends. -1: it needs none to end.
function provedUpTo(network, pixels, factor = 1) {
  const holds = (noise) => {
    const { lower, upper } = settle(network, injected(network, pixels, noise), factor);
    return judge(network, lower.at(-1), upper.at(-1)).proved;
  };
  if (!holds(0)) return -1;
  if (holds(WIDEST)) return WIDEST;
  let [low, high] = [0, WIDEST];
  for (let i = 0; i < 20; i++) {
    const middle = (low + high) / 2;
    if (holds(middle)) low = middle;
    else high = middle;
  }
  return low;
}
