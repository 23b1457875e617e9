"use strict";
// Draws the picture that stands as JSON in the page. One view (from, to) in time is shared by the
// lanes and by the memory of every rank, so that what stands above each other happened together.
const data = JSON.parse(document.getElementById("data").textContent);
const canvas = document.getElementById("lanes");
const details = document.getElementById("details");
const ROW = 28, LANE = 18, GAP = 5, HEAD = 26, PAD = 10, MEMORY = 132;
const FONT = "ui-sans-serif, system-ui, 'Segoe UI', Helvetica, Arial, sans-serif";
const MEMORY_COLOURS = ["#56b4e9", "#e69f00", "#2fb98f", "#cc79a7", "#0072b2", "#d55e00", "#f0e442", "#8c6bb1"];
const HINT = "Point at an operation, or press n in the timeline.";
const view = { from: data.start, to: data.end };
const whole = Math.max(data.end - data.start, 1e-12);
let chosen = null; // [track number, span number]
let margin = 80;

let height = HEAD;
for (const track of data.tracks) {
  track.height = track.lane === "compute" ? ROW : LANE;
  if (track.lane === "compute" && !track.source && height > HEAD) height += GAP;
  track.top = height;
  height += track.height + 1;
}
height += PAD;

const kinds = [...new Set(data.memory.flatMap((one) => one.kinds))];
const charts = data.memory.map((one) => {
  const chart = document.createElement("canvas");
  chart.setAttribute("role", "img");
  one.most = Math.max(...one.points.map((p) => p.slice(1).reduce((a, b) => a + b, 0)), 1e-12);
  const name = `rank ${one.rank}` + (data.names.length ? `, ${data.names[one.source]}` : "");
  chart.setAttribute("aria-label", `Memory of ${name} over time, at most ${amount(one.most)}`);
  return { ...one, chart, name };
});
if (charts.length) {
  const box = document.getElementById("memory");
  const heading = document.createElement("h2");
  heading.textContent = `What each rank holds, in ${data.unit}`;
  const about = document.createElement("p");
  about.textContent = `${data.most_words} The kinds are stacked in the order of the legend, the first at the bottom.`;
  const legend = document.createElement("div");
  legend.className = "legend";
  for (const [i, kind] of kinds.entries()) {
    const key = document.createElement("span"), swatch = document.createElement("b");
    key.className = "key";
    swatch.style.background = MEMORY_COLOURS[i % MEMORY_COLOURS.length];
    key.append(swatch, kind);
    legend.append(key);
  }
  box.append(heading, about, legend, ...charts.map((one) => one.chart));
  for (const one of charts) {
    one.chart.style.marginBottom = "6px";
    one.chart.addEventListener("pointermove", (event) => {
      const time = Math.min(Math.max(timeAt(event.offsetX), data.start), data.end);
      details.replaceChildren(`at ${short(time)}${data.clock}: ${holds(one, time)}`);
    });
  }
}

// Bytes in units of a thousand, as everywhere; what else is counted as it is.
function amount(x) {
  if (data.unit !== "bytes") return `${short(x)} ${data.unit}`;
  const power = Math.min(Math.max(Math.floor(Math.log10(Math.max(x, 1)) / 3), 0), 4);
  return `${Number((x / 1000 ** power).toPrecision(3))} ${["B", "kB", "MB", "GB", "TB"][power]}`;
}
// What a rank holds at a time, in words.
function holds(one, time) {
  const now = one.points.findLast((p) => p[0] <= time + 1e-12) || one.points[0];
  const parts = one.kinds.map((kind, k) => [kind, now[k + 1]]).filter(([, held]) => held > 0);
  const total = parts.reduce((sum, [, held]) => sum + held, 0);
  return `rank ${one.rank} holds ${amount(total)}: ` + parts.map(([kind, held]) => `${kind} ${amount(held)}`).join(", ");
}
function short(x) { return Math.abs(x) >= 1e4 ? Math.round(x).toLocaleString("en") : String(Number(x.toPrecision(4))); }
function style(name) { return getComputedStyle(document.documentElement).getPropertyValue(name).trim(); }
function x(time) { return margin + ((time - view.from) / (view.to - view.from)) * (canvas.clientWidth - margin - PAD); }
function timeAt(px) { return view.from + ((px - margin) / (canvas.clientWidth - margin - PAD)) * (view.to - view.from); }

function sheet(target, tall) {
  const ratio = window.devicePixelRatio || 1;
  target.style.height = `${tall}px`;
  target.width = Math.round(target.clientWidth * ratio);
  target.height = Math.round(tall * ratio);
  const pen = target.getContext("2d");
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.clearRect(0, 0, target.clientWidth, tall);
  pen.font = `11px ${FONT}`;
  pen.textBaseline = "middle";
  return pen;
}

function marks() {
  const least = (view.to - view.from) * 80 / Math.max(canvas.clientWidth - margin, 80);
  const power = 10 ** Math.floor(Math.log10(least));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= least * (1 - 1e-9));
  const times = [];
  for (let i = Math.ceil(view.from / step - 1e-9); i * step <= view.to + 1e-9 * step; i++) times.push(i * step);
  return times.filter((time) => x(time) > margin - 1);
}

function grid(pen, tall) {
  pen.strokeStyle = style("--line");
  pen.lineWidth = 1;
  for (const time of marks()) {
    pen.beginPath();
    pen.moveTo(Math.round(x(time)) + 0.5, tall[0]);
    pen.lineTo(Math.round(x(time)) + 0.5, tall[1]);
    pen.stroke();
  }
}

function drawLanes() {
  const pen = sheet(canvas, height);
  margin = 24 + Math.max(...data.tracks.map((t) => pen.measureText(t.label.trim()).width + indent(t)), 40);
  pen.textAlign = "center";
  pen.fillStyle = style("--soft");
  for (const time of marks()) pen.fillText(short(time) + data.clock, x(time), HEAD / 2);
  const idle = style("--idle");
  for (const track of data.tracks) {
    pen.fillStyle = idle;
    pen.fillRect(x(data.start), track.top, x(data.end) - x(data.start), track.height);
  }
  grid(pen, [HEAD - 5, height - PAD + 3]);
  data.tracks.forEach((track, t) => drawTrack(pen, track, t));
  pen.clearRect(0, HEAD, margin - 2, height); // what was panned under the labels
  pen.textAlign = "left";
  for (const track of data.tracks) {
    pen.fillStyle = style(track.lane === "compute" && !track.source ? "--ink" : "--soft");
    pen.fillText(track.label.trim(), 12 + indent(track), track.top + track.height / 2 + 1);
  }
}

function indent(track) { return track.label.startsWith(" ") ? 10 : 0; }

function drawTrack(pen, track, t) {
  let painted = -Infinity;
  for (const [s, [start, end, kind, , , tint, names]] of track.spans.entries()) {
    if (end < view.from || start > view.to) continue;
    const left = x(start), right = x(end), mine = chosen && chosen[0] === t && chosen[1] === s;
    if (right < painted + 0.5 && !mine) continue; // thousands of spans share a pixel when zoomed out
    painted = right;
    const colour = data.colours[kind], wide = right - left > 3 ? right - left - 1 : Math.max(right - left, 0.75);
    pen.fillStyle = mix(colour, tint);
    pen.fillRect(left + 0.5, track.top, wide, track.height);
    if (mine) {
      pen.strokeStyle = style("--ink");
      pen.lineWidth = 2;
      pen.strokeRect(left + 0.5, track.top + 1, Math.max(wide, 2), track.height - 2);
    }
    const a = Math.max(left, margin), b = Math.min(right, canvas.clientWidth);
    // One width for every character, so that I0 is not named where W0 beside it is not.
    const name = names.find((n) => n.length * 6.5 + 2 <= b - a);
    if (name) {
      pen.fillStyle = tint < 0.4 ? colour.ink : "#000000";
      pen.textAlign = "center";
      pen.fillText(name, (a + b) / 2, track.top + track.height / 2 + 1);
    }
  }
}

function mix(colour, tint) {
  const part = (hex, i) => parseInt(hex.slice(i, i + 2), 16);
  const at = (i) => Math.round(part(colour.fill, i) * (1 - tint) + part(colour.light, i) * tint);
  return `rgb(${at(1)},${at(3)},${at(5)})`;
}

// The highest amount of the memory axis, which all ranks share.
const upper = Math.max(data.limit, ...charts.map((c) => c.most));

// Round amounts from 0 to the top, four at most above 0.
function amounts() {
  const power = 10 ** Math.floor(Math.log10(upper / 4));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= (upper / 4) * (1 - 1e-9));
  return Array.from({ length: Math.floor(upper / step + 1e-9) + 1 }, (_, i) => i * step);
}

function drawMemory(one) {
  const pen = sheet(one.chart, MEMORY), ceiling = 22, floor = MEMORY - 20, room = floor - ceiling;
  const y = (amount) => floor - (amount / upper) * room;
  const base = one.points.map(() => 0);
  for (const [k, kind] of one.kinds.entries()) {
    const edge = one.points.map((p, i) => base[i] + Math.max(p[k + 1], 0));
    pen.beginPath();
    for (const [i, p] of one.points.entries()) {
      const next = i + 1 < one.points.length ? one.points[i + 1][0] : data.end;
      pen.lineTo(x(p[0]), y(edge[i]));
      pen.lineTo(x(next), y(edge[i]));
    }
    for (let i = one.points.length - 1; i >= 0; i--) {
      const next = i + 1 < one.points.length ? one.points[i + 1][0] : data.end;
      pen.lineTo(x(next), y(base[i]));
      pen.lineTo(x(one.points[i][0]), y(base[i]));
    }
    pen.fillStyle = MEMORY_COLOURS[kinds.indexOf(kind) % MEMORY_COLOURS.length];
    pen.fill();
    edge.forEach((u, i) => { base[i] = u; });
  }
  grid(pen, [ceiling, floor + 3]);
  const right = canvas.clientWidth - PAD;
  rule(pen, style("--line"), amounts().map(y), right);
  if (data.limit) {
    pen.setLineDash([6, 3]);
    rule(pen, style("--bad"), [y(data.limit)], right);
    pen.setLineDash([]);
  }
  pen.clearRect(0, 0, margin - 4, MEMORY); // what was panned under the labels
  pen.fillStyle = style("--soft");
  pen.textAlign = "center";
  for (const time of marks()) pen.fillText(short(time) + data.clock, x(time), floor + 11);
  pen.textAlign = "right";
  for (const held of amounts()) pen.fillText(data.unit === "bytes" ? amount(held) : short(held), margin - 7, y(held));
  pen.textAlign = "left";
  pen.fillStyle = style("--ink");
  const most = data.unit === "bytes" ? amount(one.most) : short(one.most);
  pen.fillText(`${one.name}: at most ${most}`, 12, 11);
}

// Horizontal lines over the plot.
function rule(pen, colour, heights, right) {
  pen.strokeStyle = colour;
  for (const height of heights) {
    pen.beginPath();
    pen.moveTo(margin - 4, Math.round(height) + 0.5);
    pen.lineTo(right, Math.round(height) + 0.5);
    pen.stroke();
  }
}

let waiting = false;
function draw() {
  if (waiting) return;
  waiting = true;
  requestAnimationFrame(() => {
    waiting = false;
    drawLanes();
    charts.forEach(drawMemory);
  });
}

function zoom(factor, about) {
  const span = Math.min(Math.max((view.to - view.from) * factor, whole * 1e-6), whole * 1.1);
  const share = (about - view.from) / (view.to - view.from);
  view.from = about - span * share;
  view.to = view.from + span;
  keep();
}

function move(by) {
  view.from += by;
  view.to += by;
  keep();
}

// The view never leaves the step.
function keep() {
  const span = view.to - view.from, edge = Math.max(0, span - whole) / 2;
  const low = data.start - edge, high = data.end + edge;
  if (view.from < low) { view.to += low - view.from; view.from = low; }
  if (view.to > high) { view.from -= view.to - high; view.to = high; }
  draw();
}

function all() { view.from = data.start; view.to = data.end; draw(); }

function find(px, py) {
  const t = data.tracks.findIndex((one) => py >= one.top && py < one.top + one.height);
  if (t < 0 || px < margin) return null;
  const time = timeAt(px), spans = data.tracks[t].spans;
  const s = spans.findIndex(([start, end]) => time >= start && time <= end);
  return s < 0 ? null : [t, s];
}

function choose(next) {
  if (String(next) === String(chosen)) return;
  chosen = next;
  details.replaceChildren(chosen ? "" : HINT);
  if (chosen) {
    const track = data.tracks[chosen[0]], [start, end, , name, does] = track.spans[chosen[1]];
    const strong = document.createElement("b");
    strong.textContent = name;
    const where = `rank ${track.rank}, ${track.lane}` + (data.names.length ? `, ${data.names[track.source]}` : "");
    details.append(strong, ` ${does} (${where})`, document.createElement("br"),
      `start ${short(start)}${data.clock}, end ${short(end)}${data.clock}, takes ${short(end - start)}${data.clock}`);
    const one = charts.find((c) => c.rank === track.rank && c.source === track.source);
    if (one) details.append(document.createElement("br"), holds(one, start));
  }
  draw();
}

// With the keyboard: along a lane, or to what runs at the same time on the next lane.
function stepAlong(by) {
  const first = data.tracks.findIndex((t) => t.spans.length);
  if (first < 0) return;
  const [t, s] = chosen || [first, by > 0 ? -1 : 0];
  const last = data.tracks[t].spans.length - 1;
  choose([t, Math.min(Math.max(s + by, 0), last)]);
  show();
}

function stepAcross(by) {
  if (!chosen) { stepAlong(1); return; }
  const time = data.tracks[chosen[0]].spans[chosen[1]][0];
  for (let t = chosen[0] + by; t >= 0 && t < data.tracks.length; t += by) {
    const spans = data.tracks[t].spans;
    if (!spans.length) continue;
    const s = spans.findIndex(([, end]) => end > time);
    choose([t, s < 0 ? spans.length - 1 : s]);
    show();
    return;
  }
}

function show() {
  const [start, end] = data.tracks[chosen[0]].spans[chosen[1]];
  if (start < view.from) move(start - view.from);
  if (end > view.to) move(Math.min(end - view.to, start - view.from));
}

const keys = {
  "+": () => zoom(1 / 1.4, (view.from + view.to) / 2), "=": () => keys["+"](),
  "-": () => zoom(1.4, (view.from + view.to) / 2), "0": all,
  ArrowLeft: () => move((view.from - view.to) / 8), ArrowRight: () => move((view.to - view.from) / 8),
  n: () => stepAlong(1), p: () => stepAlong(-1), ArrowUp: () => stepAcross(-1), ArrowDown: () => stepAcross(1),
  Escape: () => choose(null),
};
canvas.addEventListener("keydown", (event) => {
  if (!keys[event.key] || event.ctrlKey || event.metaKey || event.altKey) return;
  event.preventDefault();
  keys[event.key]();
});
// The wheel alone scrolls the page, so that nobody is caught in the timeline.
canvas.addEventListener("wheel", (event) => {
  if (!event.ctrlKey && !event.metaKey) return;
  event.preventDefault();
  if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
    move(((event.deltaX || event.deltaY) / canvas.clientWidth) * (view.to - view.from));
  } else {
    zoom(Math.exp(event.deltaY * 0.002), timeAt(event.offsetX));
  }
}, { passive: false });
let held = null;
canvas.addEventListener("pointerdown", (event) => { held = event.offsetX; canvas.setPointerCapture(event.pointerId); });
canvas.addEventListener("pointerup", () => { held = null; });
canvas.addEventListener("pointercancel", () => { held = null; });
canvas.addEventListener("pointermove", (event) => {
  if (held === null) { choose(find(event.offsetX, event.offsetY)); return; }
  move(timeAt(held) - timeAt(event.offsetX));
  held = event.offsetX;
});
document.getElementById("in").addEventListener("click", keys["+"]);
document.getElementById("out").addEventListener("click", keys["-"]);
document.getElementById("all").addEventListener("click", all);
details.textContent = HINT;
window.addEventListener("resize", draw);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
draw();
