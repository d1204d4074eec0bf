// What is seen. A frame is drawn when something has changed, and while the steps are played.

const $ = (id) => document.getElementById(id);
const [paper, seen, noise, factor, stepper] = ["paper", "seen", "noise", "factor", "step"].map($);
const stored = JSON.parse($("networks").textContent), [{ image, classes }] = stored;
const pen = paper.getContext("2d", { willReadFrequently: true });
const still = matchMedia("(prefers-reduced-motion: reduce)");
const PAPERS = ["tanh", "softsign", "relu6", "sigmoid"]; // the activations of the paper
const SECONDS = 2.5; // to play all steps
const FEWEST = 24; // steps on the axis, whose ticks are powers of ten
const TICKS = [0, -5, -10, -15];
const SAMPLES = [
  "M140 42C70 42 70 238 140 238C210 238 210 42 140 42",
  "M112 78L148 42V238",
  "M84 90C90 22 196 22 196 92C196 146 106 182 81 238H204",
  "M87 56C140 22 202 45 190 92C182 129 140 132 123 134C168 132 207 157 199 196C188 249 112 252 78 216",
  "M162 238V42L73 174H210",
  "M193 45H101L92 129C140 101 202 126 196 179C190 241 118 252 81 216",
  "M174 39C123 67 87 129 87 179C87 252 193 252 193 185C193 123 106 123 90 174",
  "M78 48H202C174 106 146 168 129 238",
  "M140 134C78 112 84 42 140 42C196 42 202 112 140 134C67 157 73 238 140 238C207 238 213 157 140 134",
  "M190 95C190 28 92 28 92 95C92 151 185 151 190 95C193 154 179 202 146 241",
];

// One entry for each activation: a network that was trained with it, else the first one with its s replaced.
const choices = [...new Set([...stored.map((one) => one.activation), ...PAPERS])].map((activation) => {
  const own = stored.find((one) => one.activation === activation), network = readNetwork(own ?? stored[0]);
  return { network: { ...network, activation }, plain: unconstrained({ ...network, activation }), borrowed: !own };
});
let chosen = choices[0], pixels = null; // what is looked at: a network, and the prepared drawing if there is one
let thought = null, wild = null; // all steps of the layer, and of the one without its constraint
let playing = 0, dirty = false; // since when the steps are played, and whether to think again
let pointer = null, sample = 0;

const noiseLevel = () => WIDEST * (noise.value / 1000) ** 3;
const factorLevel = () => 100 ** (factor.value / 1000);
const largest = (a, b) => a.reduce((most, z, i) => Math.max(most, Math.abs(z - b[i])), 1e-16);
const clamp = (x, low, high) => Math.min(Math.max(x, low), high);
const power = (number) => `10${String(number).replace(/./g, (sign) => "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"["-0123456789".indexOf(sign)])}`;
const point = (x, y) => `${Math.round(1000 * x)} ${Math.round(1000 * y)}`; // of a drawing from 0 to 1
const path = (points) => `M${points.map(([x, y]) => point(x, y)).join("L")}`;

// All units side by side, in the order of where they settle: a mark for each, or one line through all.
function across(units, y, mark) {
  const places = thought.order.map((unit, i) => [(i + 0.5) / units.length, y(units[unit])]);
  if (!mark) return path(places);
  return places.map(([x, y], i) => `M${point(x, y)}${mark(thought.order[i])}`).join("");
}

// Each shape is made once; then only its path is set.
function draw(svg, shapes) {
  for (const [name, d] of Object.entries(shapes)) {
    let shape = svg.getElementsByClassName(name)[0];
    if (!shape) svg.append((shape = document.createElementNS("http://www.w3.org/2000/svg", "path")));
    shape.setAttribute("class", name);
    shape.setAttribute("d", d);
  }
}

// Everything from the drawing on; some milliseconds.
function rethink() {
  const { data } = pen.getImageData(0, 0, paper.width, paper.height), ink = new Uint8Array(data.length / 4);
  for (let i = 0; i < ink.length; i++) ink[i] = data[4 * i + 3];
  pixels = prepare(ink, paper.width, image);
  const shown = pixels ?? new Float64Array(image[0] * image[1]);
  thought = think(chosen.network, shown, noiseLevel(), factorLevel());
  const settled = boxOf(thought.lower.at(-1), thought.upper.at(-1)).centre;
  thought.order = Array.from(settled.keys()).sort((a, b) => settled[a] - settled[b]);
  stepper.max = Math.max(FEWEST, thought.lower.length - 1);
  wild = settlePlain(chosen.plain, injected(chosen.network, shown, 0).lower, factorLevel(), +stepper.max);
  showPicture(shown);
  showChart();
  $("noise-out").value = noiseLevel() ? `± ${noiseLevel().toPrecision(2)} in each pixel` : "none";
  $("factor-out").value = `× ${+factorLevel().toPrecision(factorLevel() < 99.5 ? 2 : 3)}`;
  $("trained").textContent = chosen.borrowed ? `, weights trained with ${stored[0].activation}` : "";
  clearTimeout(rethink.later);
  $("end").hidden = !pixels;
  $("end-out").textContent = "";
  rethink.later = setTimeout(showEnd, 120);
}

function showPicture(shown) {
  [seen.height, seen.width] = image;
  const context = seen.getContext("2d"), picture = context.createImageData(image[1], image[0]);
  shown.forEach((pixel, i) => {
    const grey = clamp(pixel + noiseLevel() * (2 * Math.random() - 1), 0, 1);
    picture.data.set([255 * grey, 255 * grey, 255 * grey, 255], 4 * i);
  });
  context.putImageData(picture, 0, 0);
  $("hint").hidden = pixels !== null;
}

function showEnd() {
  if (playing) return void (rethink.later = setTimeout(showEnd, 120)); // it takes longer than a frame
  const most = pixels ? provedUpTo(chosen.network, pixels, factorLevel()) : -1;
  $("end").hidden = most < 0;
  $("end").style.left = `calc(8px + (100% - 16px) * ${Math.cbrt(Math.max(most, 0) / WIDEST)})`;
  $("end-out").textContent = most < 0 ? "" : `The proof holds up to ± ${most.toPrecision(2)}.`;
}

const height = (number) => (1 - Math.log10(number)) / 17; // from 10 at the top to 1e-16

function showChart() {
  const last = +stepper.max, { lower, upper, provedAt } = thought, proved = provedAt >= 0 && pixels;
  const gaps = lower.map((low, k) => [k / last, height(largest(upper[k], low))]);
  const moves = wild.slice(1).map((z, k) => [(k + 1) / last, height(largest(z, wild[k]))]);
  draw($("chart"), {
    grid: TICKS.map((tick) => `M${point(0, height(10 ** tick))}h1000`).join(""),
    "curve wild": path(moves),
    "curve gap": path([...gaps, [1, gaps.at(-1)[1]]]),
    flag: proved ? `M${point(provedAt / last, 0)}v1000` : "",
  });
  $("mark").textContent = proved ? `proved at step ${provedAt}` : "";
  Object.assign($("mark").style, { left: `${(100 * provedAt) / last}%`, translate: `${(-100 * provedAt) / last}%` });
  $("plain-state").textContent = moves.at(-1)[1] < height(1e-6) ? "does not settle" : "settles, too";
}

// One moment: between two steps, bounds in between are bounds, too.
function show(position) {
  const k = Math.floor(position), part = position - k, { lower, upper, top } = thought;
  const blend = (points) => {
    const [from, to] = [k, k + 1].map((step) => points[Math.min(step, points.length - 1)]);
    return from.map((z, i) => z + part * (to[i] - z));
  };
  const [low, high, plain] = [lower, upper, wild].map(blend), gap = largest(high, low), dot = () => "h0";
  const y = (z) => 1 - z / top;
  const stride = Math.ceil(lower.length / 40), past = (_, i) => i <= k && i % stride === 0;
  const trail = (points) => points.filter(past).map((z) => across(z, y)).join("");
  draw($("units"), { "low trail": trail(lower), "high trail": trail(upper),
    "high dots": across(high, y, dot), "low dots": across(low, y, dot) });
  const ground = ACTIVATIONS[chosen.network.activation].s(-1) < 0 ? -top : 0, wildY = (z) => (top - z) / (top - ground);
  const recent = wild.slice(Math.max(0, k - 8), k + 1);
  const span = (choose) => plain.map((_, i) => choose(...recent.map((z) => z[i]))), most = span(Math.max);
  draw($("plain"), { grid: `M${point(0, wildY(0))}h1000`, "wild dots": across(plain, wildY, dot),
    "wild reach": across(span(Math.min), wildY, (i) => `V${Math.round(1000 * wildY(most[i]))}`) });
  draw($("chart"), { now: `M${point(position / stepper.max, 0)}v1000` });
  $("units").classList.toggle("met", gap < 0.01 * top);
  const size = Math.ceil(Math.log10(gap));
  $("state").textContent = gap < 1e-13 ? "closed" : `gap below ${size < 0 ? power(size) : 10 ** size}`;
  stepper.value = k;
  $("step-out").value = `step ${k} of ${stepper.max}`;
  showVerdict(judge(chosen.network, low, high), position >= +stepper.max);
}

function showVerdict({ scores, best, least, most, proved }, ended) {
  const rest = classes.filter((_, c) => c !== best && most[c] >= 0);
  const range = Math.max(...thought.verdict.least.map(Math.abs), 1e-9);
  const words = proved ? ["✓ proved", `no other can win${noiseLevel() ? ", whatever the noise" : ""}`]
    : [ended ? "not proved" : "settling …", `it may be ${rest.length > 5 ? "any other" : rest.join(", ")}`];
  if (proved && (factorLevel() > 1 || chosen.borrowed)) words[1] += " – for weights that nobody trained";
  $("answer").classList.toggle("proved", proved && pixels !== null);
  $("digit").textContent = pixels ? classes[best] : "";
  [$("word").textContent, $("why").textContent] = pixels ? words : ["", "draw a digit"];
  if (ended && pixels) $("live").textContent = `${$("digit").textContent} ${words.join(", ")}`;
  $("scores").childNodes.forEach((row, c) => {
    const place = (score) => clamp(78 + (72 * score) / range, 0, 100);
    const [from, middle, to] = [least[c], scores[c] - scores[best], most[c]].map(place);
    row.className = !pixels ? "" : c === best ? "best" : most[c] >= 0 ? "can" : "";
    draw(row.lastChild, { bar: pixels ? `M0 5H${middle}` : "", band: pixels && c !== best ? `M${from} 5H${to}` : "",
      finish: "M78 0V10" });
  });
}

function frame(now) {
  if (dirty) rethink();
  const last = +stepper.max, time = playing ? (now - playing) / (1000 * SECONDS) : 1;
  if (dirty || playing) show(time < 1 ? last * Math.max(time, 0) ** 1.7 : last);
  if (time >= 1) playing = 0;
  dirty = false;
  if (playing) requestAnimationFrame(frame);
}

function changed(play = false) {
  if (!dirty && !playing) requestAnimationFrame(frame);
  dirty = true;
  playing = play && !still.matches ? performance.now() : 0;
}

// Drawing: pointer or keys. The pen is as thick as MNIST's.
const spot = { x: 140, y: 90 };

function line(to) {
  pen.beginPath();
  pen.moveTo(spot.x, spot.y);
  move(to);
  pen.lineTo(spot.x, spot.y + 0.01); // a line of no length would not be drawn
  pen.stroke();
  changed();
}

function move(to) {
  Object.assign(spot, { x: clamp(to.x, 0, paper.width), y: clamp(to.y, 0, paper.height) });
  Object.assign($("nib").style, { left: `${(100 * spot.x) / paper.width}%`, top: `${(100 * spot.y) / paper.height}%` });
}

function placeOf(event) {
  const box = paper.getBoundingClientRect(), scale = paper.width / box.width;
  return { x: (event.clientX - box.left) * scale, y: (event.clientY - box.top) * scale };
}

function clear() {
  pen.clearRect(0, 0, paper.width, paper.height);
  changed();
}

function write(digit) {
  clear();
  pen.stroke(new Path2D(SAMPLES[(sample = digit)]));
  changed(true);
}

paper.addEventListener("pointerdown", (event) => {
  if (pointer !== null || event.button) return;
  paper.setPointerCapture((pointer = event.pointerId));
  move(placeOf(event));
  line(spot);
});
paper.addEventListener("pointermove", (event) => {
  if (event.pointerId === pointer) for (const one of event.getCoalescedEvents?.() ?? [event]) line(placeOf(one));
});
for (const end of ["pointerup", "pointercancel"]) paper.addEventListener(end, (event) => {
  if (event.pointerId === pointer) (pointer = null), changed(true);
});
paper.addEventListener("keydown", (event) => {
  const moves = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (/^\d$/.test(event.key)) write(+event.key);
  else if (event.key === "Delete" || event.key === "Backspace") clear();
  else if (moves) {
    const to = { x: spot.x + 10 * moves[0], y: spot.y + 10 * moves[1] };
    (event.shiftKey ? move : line)(to);
  } else return;
  event.preventDefault();
});
$("clear").onclick = clear;
$("sample").onclick = () => write((sample + 1) % SAMPLES.length);
$("play").onclick = () => changed(true);
stepper.oninput = () => { playing = 0; show(+stepper.value); };
noise.oninput = factor.oninput = () => changed();
factor.onchange = () => changed(true);

Object.assign(pen, { lineWidth: 24, lineCap: "round", lineJoin: "round", strokeStyle: "#fff" });
for (const svg of document.querySelectorAll("svg")) svg.setAttribute("preserveAspectRatio", "none");
for (const id of ["units", "plain", "chart"]) $(id).setAttribute("viewBox", "0 0 1000 1000");
for (const name of classes) {
  const row = $("scores").appendChild(document.createElement("div"));
  row.innerHTML = '<span></span><svg viewBox="0 0 100 10" preserveAspectRatio="none"></svg>';
  row.firstChild.textContent = name;
}
for (const p of TICKS) {
  const tick = $("chart").parentNode.appendChild(document.createElement("span"));
  Object.assign(tick, { className: "tick", textContent: power(p) }).style.top = `${100 * height(10 ** p)}%`;
}
choices.forEach((choice, i) => {
  const { activation } = choice.network, id = `activation-${i}`;
  const button = Object.assign(document.createElement("input"), { type: "radio", name: "activation", id });
  const label = Object.assign(document.createElement("label"), { htmlFor: id, textContent: activation });
  label.classList.toggle("borrowed", choice.borrowed);
  $("activations").append(button, label);
  button.checked = choice === chosen;
  button.onchange = () => { chosen = choice; changed(true); };
});
move(spot);
write(3);
