// Curves by uPlot, with the job's incidents marked on each. A chart is rebuilt only when its series or the colours
// change. Every chart shows its value at the pointer's moment.

import { $, attribute, bytes, colour, compactNumber, duration, el, number, write } from "./dom.js";
import { csv, png, save } from "./export.js";
import { linked } from "./links.js";
import { clustered, crosshair, nearest, point, switches, wanted } from "./marks.js";
import { keep, span, told } from "./place.js";
import { WORDS } from "./words.js";

const PHONE = matchMedia("(max-width: 560px)").matches;
const HEIGHT = PHONE ? 140 : 200;
const MOST_OWN_ON_PHONES = 3; // the others go into a panel that is folded there
const PHASE_COLOURS = { load: "c6", forward: "c0", backward: "c4", transfer: "c3", reduce: "c1", agree: "c5", update: "c2", stall: "warn", recover: "bad", other: "c7" };
const STEPS = [1, 2, 5].flatMap((m) => [...Array(10).keys()].map((p) => m * 10 ** p)).sort((a, b) => a - b);

export class Chart {
  /** format: a value as text; series names and colours come with the data. note: explains the values. */
  constructor(root, title, format = (v) => number(v, 3), options = {}) {
    this.title = title;
    this.format = format;
    this.options = options;
    this.plot = null;
    this.marks = [];
    this.pixels = [];
    this.log = false;
    this.now = el("span", { className: "now" });
    this.note = el("small", {}, options.note ?? "");
    this.box = el("div", { className: "plot", role: "img", "aria-label": title });
    this.figure = el("figure", { className: "chart" }, el("figcaption", {}, el("b", {}, title), this.note, ...(options.tools ?? []), this.now, this.saves()), this.box);
    root.append(this.figure);
    if (!options.alone) crosshair.followers.add(this);
    new ResizeObserver(() => this.fit()).observe(this.box);
  }

  /** Buttons that save what is drawn. */
  saves() {
    const button = (text, save) => el("button", { type: "button", "aria-label": `${this.title} as ${text}`, onclick: save }, text);
    const name = (end) => `${document.getElementById("name").textContent}-${this.title}.${end}`;
    const label = () => (this.time ? "unix_s" : (this.options.label ?? "step"));
    return el(
      "span",
      { className: "saves" },
      button("CSV", () => save(name("csv"), new Blob([csv(label(), this.plot.data[0], this.series)], { type: "text/csv" }))),
      button("PNG", async () => save(name("png"), await png(this.title, this.plot, this.series.filter((s) => !s.faint)))),
    );
  }

  /** Show this range of x, or with null all of it. */
  zoom(range) {
    this.range = range;
    if (this.plot && !range) this.plot.everything = true; // also where it is hidden now
    if (!this.plot || this.figure.hidden) return;
    if (range) this.plot.setScale("x", { min: range[0], max: range[1] });
    else this.plot.setData(this.plot.data, true);
  }

  /** x, then one array per name. time: x is seconds since 1970. marks: [{ms, step, hard, text}]. */
  update(x, series, time, marks) {
    this.figure.hidden = series.length === 0;
    if (this.figure.hidden) return;
    this.time = time;
    this.marks = marks.map((mark) => ({ ...mark, x: time ? mark.ms / 1000 : mark.step })).filter((mark) => mark.x !== null);
    this.series = series;
    const signature = `${time}|${this.log}|${series.map((s) => s.name).join("|")}|${document.documentElement.dataset.theme}`;
    const shown = this.options.stacked ? stack(series) : series.map((s) => (this.log ? s.y.map((v) => (v > 0 ? v : null)) : s.y));
    const data = [x, ...shown];
    if (!this.plot || signature !== this.signature) this.make(signature, series, time, data);
    else this.plot.setData(data, !this.range && this.plot.everything !== false);
    this.rest();
    const text = series.map((s) => `${s.name} ${this.format(s.y.findLast((v) => v !== null && v !== undefined))}`).join(", ");
    attribute(this.box, "aria-label", `${this.title}: ${text}; ${this.marks.filter((m) => m.hard).length} faults marked`);
  }

  make(signature, series, time, data) {
    this.plot?.destroy();
    this.signature = signature;
    const axis = { stroke: colour("soft"), grid: { stroke: colour("grid"), width: 1 }, ticks: { stroke: colour("grid") }, font: "11px system-ui, sans-serif" };
    const along = time ? { space: (u, i, low, high) => (high - low > 36000 && high - low <= 172800 ? 112 : 76), values: moments } : { space: 56, incrs: STEPS, values: (u, ticks) => ticks.map((v) => (v < 100000 ? String(v) : compactNumber(v))) };
    const width = (u, labels) => 16 + 6.4 * Math.max(2, ...(labels ?? []).map((text) => text?.length ?? 0));
    this.plot = new uPlot(
      {
        width: Math.max(200, this.box.clientWidth),
        height: HEIGHT,
        scales: { x: { time }, y: this.log ? { distr: 3 } : this.options.range ? { range: this.options.range } : {} },
        axes: [{ ...axis, size: 30, ...along }, { ...axis, size: width, space: this.log ? 20 : 32, values: (u, ticks) => this.labels(ticks) }],
        legend: { show: series.filter((s) => !s.faint).length > 1, markers: { dash: (u, i) => (u.series[i].dash?.length ? "dashed" : "solid") } },
        cursor: { y: false, drag: { x: true, y: false } },
        bands: this.options.stacked ? series.slice(1).map((_, i) => ({ series: [i + 2, i + 1] })) : [],
        series: [{ label: time ? "time" : (this.options.label ?? "step"), value: (u, v) => this.place(v) }, ...series.map((s) => this.line(s, data[0].length))],
        hooks: { setSelect: [(u) => this.selected(u)], draw: [(u) => this.draw(u)], setCursor: [(u) => this.point(u)], setScale: [(u, key) => key === "x" && this.zoomed(u)] },
      },
      data,
      this.box,
    );
    for (const label of this.box.querySelectorAll(".u-legend .u-label")) label.title = WORDS[label.textContent] ?? "";
    this.plot.over.addEventListener("dblclick", () => this.options.zoomed?.(null, this));
    if (this.range) this.zoom(this.range);
  }

  /** A range was dragged: the other charts with the same axis show it, too. */
  selected(u) {
    const { left, width } = u.select;
    if (width > 0) this.options.zoomed?.([u.posToVal(left, "x"), u.posToVal(left + width, "x")], this);
  }

  /** Labels of an axis: as many digits as tell neighbours apart. */
  labels(ticks) {
    if (this.options.ticks) return ticks.map((v) => (v === null ? null : this.options.ticks(v)));
    const known = ticks.filter((v) => v !== null), step = known.length > 1 ? Math.abs(known[1] - known[0]) : 0;
    const digits = step > 0 ? Math.min(8, Math.max(0, Math.ceil(-Math.log10(step) - 1e-9))) : 0;
    return ticks.map((v) => (v === null ? null : Math.abs(v) >= 10000 ? compactNumber(v) : this.log || (v && Math.abs(v) < 1e-4) ? String(Number(v.toPrecision(2))) : v.toFixed(enough(known, digits))));
  }

  place(v) {
    return v === null || v === undefined ? "–" : this.time ? precise(v) : String(v);
  }

  /** One series for uPlot; of a stack, the area between it and the one below, told with its own value. */
  line(s, points) {
    const tint = colour(s.colour);
    const common = { label: s.name, stroke: tint, dash: s.dash, value: (u, v, i, at) => this.told(s.name, at) };
    if (!this.options.stacked) return { ...common, width: s.faint ? 1 : 1.6, alpha: s.faint ? 0.35 : 1, points: this.options.gaps ? { show: true, filter: alone } : { show: points < 3 || this.options.points === true }, spanGaps: !this.options.gaps };
    return { ...common, width: 0, fill: tint, points: { show: false }, paths: uPlot.paths.stepped({ align: -1 }) };
  }

  /** A series' own value at an index as text. */
  told(name, at) {
    const value = at === null || at === undefined ? null : this.series.find((s) => s.name === name)?.y[at];
    return value === null || value === undefined ? "–" : this.format(value);
  }

  /** Show the values at an index of x; null: the newest, without a place unless it may be of an older step. */
  tell(at) {
    const strong = this.series.findLast((s) => !s.faint) ?? this.series[0];
    const last = strong.y.findLastIndex((v) => v !== null && v !== undefined);
    const i = at ?? last, x = this.plot.data[0][i];
    const where = at === null && !this.options.placed && last === this.plot.data[0].length - 1 ? "" : this.time ? `${this.place(x)}: ` : `${this.options.label ?? "step"} ${this.place(x)}: `;
    write(this.now, this.series.filter((s) => !s.faint).length > 1 ? (at === null ? "" : where.slice(0, -2)) : `${where}${this.told(strong.name, i)}`);
    this.now.classList.toggle("pointed", at !== null);
  }

  /** Nothing is pointed at: show the newest values. */
  rest() {
    if (this.plot.cursor.left >= 0) return this.tell(this.plot.cursor.idx ?? null);
    this.plot.setLegend({ idx: this.plot.data[0].length - 1 }, false);
    this.tell(null);
  }

  zoomed(u) {
    const x = u.data[0];
    u.everything = !x.length || (u.scales.x.min <= x[0] && u.scales.x.max >= x[x.length - 1]);
  }

  draw(u) {
    const { ctx, bbox } = u;
    const scale = devicePixelRatio;
    const seen = this.marks.filter((mark) => mark.x >= u.scales.x.min && mark.x <= u.scales.x.max);
    this.pixels = clustered(seen.map((mark) => ({ ...mark, px: u.valToPos(mark.x, "x") })));
    ctx.save();
    for (const cluster of this.pixels) {
      const x = Math.round(bbox.left + cluster.px * scale) + 0.5;
      ctx.strokeStyle = ctx.fillStyle = colour(cluster.hard ? "bad" : "soft");
      ctx.globalAlpha = cluster.hard ? 0.8 : 0.5;
      ctx.setLineDash(cluster.hard ? [] : [3, 4]);
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
      if (cluster.marks.length > 1) badge(ctx, x, bbox.top, scale, String(cluster.marks.length), cluster.hard);
      else if (cluster.hard) {
        ctx.beginPath();
        ctx.moveTo(x - 5 * scale, bbox.top);
        ctx.lineTo(x + 5 * scale, bbox.top);
        ctx.lineTo(x, bbox.top + 8 * scale);
        ctx.fill();
      }
    }
    ctx.restore();
  }

  /** The pointer is on this chart, or has left it. */
  point(u) {
    if (this.led) return;
    const { left, idx } = u.cursor;
    if (left < 0) {
      crosshair.show(null, this);
      return this.rest();
    }
    this.tell(idx ?? null);
    const near = this.pixels.filter((cluster) => Math.abs(cluster.px - left) < 7).sort((a, b) => Math.abs(a.px - left) - Math.abs(b.px - left))[0];
    if (near) point(near, linked);
    if (this.options.alone) return;
    const x = u.posToVal(left, "x");
    if (this.time) crosshair.time(1000 * x, this);
    else crosshair.step(Math.round(x), this);
  }

  /** The pointer is elsewhere, at this moment and step. */
  follow(at) {
    if (!this.plot || this.figure.hidden) return;
    const u = this.plot, value = at === null ? null : this.time ? (at.ms === null ? null : at.ms / 1000) : at.step;
    this.led = true;
    if (value === null || value < u.scales.x.min || value > u.scales.x.max) {
      u.setCursor({ left: -10, top: -10 });
      this.led = false;
      return this.rest();
    }
    u.setCursor({ left: u.valToPos(value, "x"), top: u.over.clientHeight / 2 });
    this.led = false;
    this.tell(nearest(u.data[0], value));
  }

  fit() {
    const width = this.box.clientWidth;
    if (this.plot && width > 0 && Math.abs(width - this.plot.width) > 1) this.plot.setSize({ width, height: HEIGHT });
  }
}

/** Points without a neighbour, which no line shows. */
const alone = (u, i) => [...u.data[i].keys()].filter((k) => (u.data[i][k] ?? null) !== null && (u.data[i][k - 1] ?? u.data[i][k + 1] ?? null) === null);

/** Digits after the point, up to `most`, that labels need to differ and to be right. */
function enough(values, most) {
  for (let digits = Math.max(0, most - 1); digits < most + 2; digits++) if (values.every((v) => Math.abs(Number(v.toFixed(digits)) - v) <= 1e-9 * Math.abs(v))) return digits;
  return Math.min(8, most + 2);
}

function badge(ctx, x, top, scale, text, hard) {
  ctx.globalAlpha = 1;
  ctx.setLineDash([]);
  ctx.font = `${10 * scale}px system-ui, sans-serif`;
  const wide = ctx.measureText(text).width + 8 * scale;
  ctx.fillStyle = colour(hard ? "bad" : "soft");
  ctx.fillRect(x - wide / 2, top, wide, 13 * scale);
  ctx.fillStyle = colour("panel");
  ctx.textAlign = "center";
  ctx.textBaseline = "top";
  ctx.fillText(text, x, top + 2 * scale);
}

/** Moments on an axis, as short as their span allows. */
function moments(u, ticks) {
  const span = u.scales.x.max - u.scales.x.min;
  const day = { day: "numeric", month: "short" }, minute = { hour: "2-digit", minute: "2-digit" };
  const form = span > 172800 ? day : span > 36000 ? { ...day, ...minute } : span > 900 ? minute : { ...minute, second: "2-digit" };
  return ticks.map((t) => new Date(1000 * t).toLocaleString("en-GB", { hour12: false, ...form }));
}

const precise = (seconds) => new Date(1000 * seconds).toLocaleTimeString("en-GB", { hour12: false });

/** Running sums over the series, point by point. */
function stack(series) {
  const below = series[0]?.y.map(() => 0) ?? [];
  return series.map((s) => s.y.map((v, i) => (below[i] += v ?? 0)));
}

const column = (run, i) => run.curves.steps?.columns[i] ?? [];

/** Over the newest `points` points up to each: samples per second, also per worker; for single points, seconds a step.
 * The time in which no job ran, before a new start, is in none of them. */
export function rates(run, points = 1) {
  const x = run.curves.steps?.x ?? [], time = column(run, 0), samples = column(run, 5), workers = column(run, 6);
  const starts = run.generations.filter((g) => g[6] === "started").map((g) => g[1] / 1000);
  const rate = [], seconds = [], each = [];
  const work = (i) => (time[i] - time[i - 1]) * (workers[i] ?? 0);
  let sum = 0, worked = 0, first = 0;
  for (let i = 0; i < x.length; i++) {
    if (starts.some((at) => time[i - 1] < at && at <= time[i])) [first, sum, worked] = [i, 0, 0];
    const from = Math.max(first, i - points);
    if (i > first) [sum, worked] = [sum + samples[i], worked + work(i)];
    if (from > first) [sum, worked] = [sum - samples[from], worked - work(from)];
    const passed = time[i] - time[from], valid = i > first && passed > 0;
    rate.push(valid ? sum / passed : null);
    seconds.push(valid ? passed / Math.max(1, x[i] - x[from]) : null);
    each.push(valid && worked > 0 ? sum / worked : null);
  }
  return { rate, seconds, each };
}

const AMOUNTS = [["", "as they are"], ["0.6", "smoothed 0.6"], ["0.9", "smoothed 0.9"], ["0.98", "smoothed 0.98"]];
const amounts = () => AMOUNTS.map(([value, text]) => el("option", { value }, text));

/** Exponential mean, as in TensorBoard's smoothing: each point weighs `share` times the one after it. */
function smooth(values, share) {
  let sum = 0, weight = 0;
  return values.map((v) => {
    if (v === null || v === undefined || !isFinite(v)) return null;
    sum = share * sum + (1 - share) * v;
    weight = share * weight + (1 - share);
    return sum / weight;
  });
}

export class Training {
  constructor() {
    const root = $("charts");
    const zero = (u, low, high) => [0, high > 0 ? 1.08 * high : 1];
    this.axis = told("axis") === "time" ? "time" : "step";
    this.ranges = { step: span("steps"), time: span("times") };
    const speed = $("speed-charts"), zoomed = (range, chart) => this.zoomed(range, chart);
    this.loss = new Chart(root, "Loss", (v) => number(v, 4), { tools: this.tools(), gaps: true, zoomed }); // a line through steps without a finite loss would be invented
    const took = (v) => (v ? duration(v) : "0"), sent = (v) => (v ? `${bytes(Math.round(v))}/s` : "0");
    this.rate = new Chart(root, "Samples per second", (v) => number(v), { range: zero, zoomed });
    this.lr = new Chart(root, "Learning rate", (v) => (v ? Number(v.toPrecision(3)).toString() : "0"), { range: zero, zoomed });
    this.each = new Chart(speed, "Samples per second and worker", (v) => number(v), { range: zero, zoomed });
    this.seconds = new Chart(speed, "Step time", took, { range: zero, ticks: took, note: "between commits", zoomed });
    this.phases = new Chart(speed, "Step time by phase, per worker", took, { range: zero, stacked: true, ticks: took, zoomed });
    this.bytes = new Chart(speed, "Sent per second, by operation", sent, { range: zero, stacked: true, ticks: sent, zoomed });
    this.scaling = new Chart(speed, "Samples per second by number of workers", (v) => number(v), { range: zero, label: "workers", points: true, alone: true, note: "over all undisturbed steps" });
    switches($("marks"), () => this.run && (this.update(this.run), this.switched?.()));
    this.tests = new Map(); // by metric: one axis does not suit an accuracy and a loss
    for (const chart of this.all()) chart.range = this.ranges[chart.time ? "time" : "step"];
  }

  /** The charts along steps or moments. */
  all() {
    return [this.loss, this.rate, this.lr, this.each, this.seconds, this.phases, this.bytes, ...this.tests.values()];
  }

  /** A chart was zoomed: so are all with its axis, and the address says it. */
  zoomed(range, from) {
    const kind = from.time ? "time" : "step";
    this.ranges[kind] = range;
    keep(`${kind}s`, range);
    for (const chart of this.all()) if (Boolean(chart.time) === from.time) chart === from ? (chart.range = range) : chart.zoom(range);
  }

  /** Show all of each curve: another run has other steps and moments. */
  unzoom() {
    this.ranges = { step: null, time: null };
    for (const chart of this.all()) chart.zoom(null);
  }

  /** A chart of the user's values or of an evaluation, made when its first value comes. */
  own(name) {
    if (!this.tests.has(name)) {
      const [, kind, title] = name.match(/^(eval|log):(.*)$/s);
      const zoomed = (range, chart) => this.zoomed(range, chart);
      const root = PHONE && this.tests.size >= MOST_OWN_ON_PHONES ? $("speed-charts") : $("charts");
      this.tests.set(name, new Chart(root, kind === "eval" ? `Evaluated: ${title}` : title, (v) => number(v, 4), { points: kind === "eval", placed: true, zoomed }));
    }
    return this.tests.get(name);
  }

  /** Options of the loss: smoothing and scale. */
  tools() {
    this.smoothing = el("select", { id: "loss-smoothing", "aria-label": "Smoothing of the loss" }, ...amounts());
    this.scale = el("button", { id: "loss-log", type: "button", "aria-pressed": "false" }, "log");
    this.smoothing.addEventListener("change", () => this.run && this.update(this.run));
    this.scale.addEventListener("click", () => {
      this.loss.log = !this.loss.log;
      attribute(this.scale, "aria-pressed", String(this.loss.log));
      if (this.run) this.update(this.run);
    });
    return [this.smoothing, this.scale];
  }

  /** The raw loss, faint below the smoothed one if that is shown. */
  drawLoss(run, x, time, marks) {
    const loss = column(run, 1), share = Number(this.smoothing.value);
    const drawn = share ? [{ name: "loss", y: loss, colour: "c0", faint: true }, { name: `smoothed ${share}`, y: smooth(loss, share), colour: "c0" }] : [{ name: "loss", y: loss, colour: "c0" }];
    const left = this.loss.log ? loss.filter((v) => v !== null && v <= 0).length : 0;
    write(this.loss.note, left ? `${left} points are not above 0 and left out` : "");
    this.loss.update(x, x.length ? drawn : [], time, marks);
  }

  /** Show a step: the crosshair stands there on all charts. */
  stand(step) {
    crosshair.step(step, null);
    $("curves").scrollIntoView({ block: "start" });
  }

  update(run) {
    this.run = run;
    const time = this.axis === "time";
    for (const chart of this.all()) chart.range = this.ranges[time || chart === this.phases || chart === this.bytes ? "time" : "step"];
    const x = time ? column(run, 0) : (run.curves.steps?.x ?? []);
    crosshair.by(run.curves.steps?.x ?? [], column(run, 0));
    const marks = wanted(run), timed = marks;
    const points = run.head.rate_points ?? 12, window = `over the last ${points} points, faint: between neighbours`;
    const { rate, seconds, each: single } = rates(run), over = rates(run, points - 1);
    const one = (chart, name, y, tint) => chart.update(x, x.length ? [{ name, y, colour: tint }] : [], time, marks);
    const two = (chart, name, faint, y, tint) => {
      chart.update(x, x.length ? [{ name: "between neighbours", y: faint, colour: tint, faint: true }, { name, y, colour: tint }] : [], time, marks);
      write(chart.note, window);
    };
    this.drawLoss(run, x, time, marks);
    two(this.rate, "samples/s", rate, over.rate, "c2");
    one(this.lr, "learning rate", column(run, 4), "c3");
    two(this.each, "per worker", single, over.each, "c4");
    one(this.seconds, "step", seconds, "c1");
    const usage = run.usage;
    const many = (chart, of, tint) => {
      const series = Object.entries(of ?? {}).map(([name, y], i) => ({ name, y: [null, ...y], colour: tint(name, i) }));
      const x = usage?.x ?? [];
      chart.update(x.length ? [x[0] - usage.width_s, ...x] : [], x.length ? series : [], true, timed); // each holds for the time before its x
      write(chart.note, usage ? `means over ${duration(usage.width_s)}` : "");
    };
    many(this.phases, usage?.seconds, (name) => PHASE_COLOURS[name] ?? "c7");
    many(this.bytes, usage?.bytes_per_s, (name, i) => `c${i % 9}`);
    const scaled = run.efficiency.measured.length > 1 ? run.efficiency.measured : [];
    const each = scaled.length ? scaled[0].samples_per_s / scaled[0].workers : 0;
    const lines = [{ name: "measured", y: scaled.map((e) => e.samples_per_s), colour: "c2" }, { name: "in proportion", y: scaled.map((e) => each * e.workers), colour: "c7" }];
    this.scaling.update(scaled.map((e) => e.workers), scaled.length ? lines : [], false, []);
    for (const name of Object.keys(run.curves).filter((name) => name !== "steps")) this.own(name);
    for (const [name, chart] of this.tests) {
      const curve = run.curves[name], x = time ? curve?.columns[0] : curve?.x, title = name.slice(name.indexOf(":") + 1);
      chart.range = this.ranges[time ? "time" : "step"];
      chart.update(x ?? [], curve ? [{ name: title, y: curve.columns[1], colour: "c4" }] : [], time, marks);
    }
  }
}

/** Every curve of the runs over each other, by step. */
export class Overlay {
  constructor() {
    this.charts = new Map();
    this.range = span("compared"); // of all charts
    this.smoothing = $("overlay-smoothing");
    this.smoothing.append(...amounts());
    this.smoothing.addEventListener("change", () => this.runs && this.update(this.runs));
  }

  /** A curve's title, values, and words for one of them, and for those at the axis if these are words, too: curves of
   * every step, and those with points of their own. */
  kinds(runs) {
    const took = (v) => (v ? duration(v) : "0"), points = (run) => (run.head.rate_points ?? 12) - 1;
    const steps = (pick) => (run) => ({ x: run.curves.steps.x, y: pick(run) });
    const own = (name) => (run) => (run.curves[name] ? { x: run.curves[name].x, y: run.curves[name].columns[1] } : null);
    const names = [...new Set(runs.flatMap((run) => Object.keys(run.curves)))].filter((name) => name !== "steps");
    return [
      ["Loss by step", steps((run) => column(run, 1)), (v) => number(v, 4)],
      ["Samples per second by step", steps((run) => rates(run, points(run)).rate), (v) => number(v)],
      ["Samples per second and worker by step", steps((run) => rates(run, points(run)).each), (v) => number(v)],
      ["Step time by step", steps((run) => rates(run, points(run)).seconds), took, took],
      ["Learning rate by step", steps((run) => column(run, 4)), (v) => (v ? Number(v.toPrecision(3)).toString() : "0")],
      ...names.map((name) => [`${name.startsWith("eval:") ? "Evaluated: " : ""}${name.slice(name.indexOf(":") + 1)} by step`, own(name), (v) => number(v, 4)]),
    ];
  }

  /** A chart was zoomed: so are the others, and the address says it. */
  zoomed(range, from) {
    this.range = range;
    keep("compared", range);
    for (const chart of this.charts.values()) chart === from ? (chart.range = range) : chart.zoom(range);
  }

  /** A new chart; on a phone most of them are folded. */
  made(title, format, ticks) {
    const chart = new Chart($(this.place()), title, format, { alone: true, ticks, zoomed: (range, from) => this.zoomed(range, from) });
    chart.range = this.range;
    this.charts.set(title, chart);
  }

  /** Where the next chart goes. */
  place() {
    if (!PHONE || this.charts.size < MOST_OWN_ON_PHONES) return "overlay";
    $("overlay-rest").hidden = false;
    return "overlay-more";
  }

  update(runs) {
    this.runs = runs;
    const there = runs.filter((run) => run.curves.steps?.x.length), share = Number(this.smoothing.value);
    if (!there.length) return;
    this.drawn = true;
    const kinds = this.kinds(there), left = new Set(this.charts.keys());
    for (const [title, pick, format, ticks] of kinds) {
      if (!this.charts.has(title)) this.made(title, format, ticks);
      left.delete(title);
      const curves = there.map((run) => [run, pick(run)]).filter(([, curve]) => curve !== null && curve.y.some((v) => v !== null));
      const table = curves.length ? uPlot.join(curves.map(([, { x, y }]) => [x, share ? smooth(y, share) : y])) : [[]];
      const lines = curves.map(([run], i) => ({ name: `${run.number} ${run.head.name}`, y: table[i + 1], colour: `c${(run.number - 1) % 9}`, dash: run.number > 9 ? [6, 3] : [] }));
      this.charts.get(title).update(table[0], lines, false, []);
    }
    for (const title of left) this.charts.get(title).update([], [], false, []);
  }
}
