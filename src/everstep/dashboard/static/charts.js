// Curves by uPlot, with faults marked on each. A chart is made anew only when its series or the colours change.

import { $, bytes, colour, duration, el, number, write } from "./dom.js";

const HEIGHT = 200;
const PHASE_COLOURS = { load: "c6", forward: "c0", backward: "c4", transfer: "c3", reduce: "c1", agree: "c5", update: "c2", stall: "warn", recover: "bad", other: "c7" };
const HARD = new Set(["fault", "evicted", "coordinator", "fallback"]);

export class Chart {
  /** format: a value as text; series names and colours come with the data. */
  constructor(root, title, format = (v) => number(v, 3), options = {}) {
    this.title = title;
    this.format = format;
    this.options = options;
    this.plot = null;
    this.marks = [];
    this.now = el("span");
    this.box = el("div", { className: "plot", role: "img", "aria-label": title });
    this.figure = el("figure", { className: "chart" }, el("figcaption", {}, el("b", {}, title), this.now), this.box);
    root.append(this.figure);
    new ResizeObserver(() => this.fit()).observe(this.box);
  }

  /** x, then one array per name. time: x is seconds since 1970. marks: [{x, kind, text}]. */
  update(x, series, time, marks) {
    this.figure.hidden = series.length === 0;
    if (this.figure.hidden) return;
    this.marks = marks;
    this.series = series;
    const signature = `${time}|${series.map((s) => s.name).join("|")}|${document.documentElement.dataset.theme}`;
    const data = [x, ...(this.options.stacked ? stack(series) : series.map((s) => s.y))];
    if (!this.plot || signature !== this.signature) this.make(signature, series, time, data);
    else this.plot.setData(data, this.plot.everything !== false);
    const last = series.map((s) => [s.name, s.y.findLast((v) => v !== null && v !== undefined)]);
    const text = last.map(([name, v]) => (series.length > 1 ? `${name} ${this.format(v)}` : this.format(v))).join(", ");
    write(this.now, series.length > 1 ? "" : text);
    this.box.setAttribute("aria-label", `${this.title}: ${text}; ${marks.filter((m) => HARD.has(m.kind)).length} faults marked`);
  }

  make(signature, series, time, data) {
    this.plot?.destroy();
    this.signature = signature;
    const axis = { stroke: colour("soft"), grid: { stroke: colour("grid"), width: 1 }, ticks: { stroke: colour("grid") }, font: "11px system-ui, sans-serif" };
    this.plot = new uPlot(
      {
        width: Math.max(200, this.box.clientWidth),
        height: HEIGHT,
        scales: { x: { time }, y: this.options.range ? { range: this.options.range } : {} },
        axes: [{ ...axis, space: time ? 80 : 60, size: 30, ...(time ? { values: moments } : { incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5, 5e5, 1e6, 2e6, 5e6, 1e7, 1e8] }) }, { ...axis, size: this.options.width ?? 56, values: (u, ticks) => ticks.map((v) => this.format(v)) }],
        legend: { show: series.length > 1 },
        cursor: { y: false, drag: { x: true, y: false } },
        bands: this.options.stacked ? series.slice(1).map((_, i) => ({ series: [i + 2, i + 1] })) : [],
        series: [{ label: time ? "time" : (this.options.label ?? "step"), value: (u, v) => (v === null || v === undefined ? "–" : time ? moments(u, [v])[0] : String(v)) }, ...series.map((s) => this.line(s, data[0].length))],
        hooks: { draw: [(u) => this.draw(u)], setCursor: [(u) => this.point(u)], setScale: [(u, key) => key === "x" && this.zoomed(u)] },
      },
      data,
      this.box,
    );
  }

  /** One series for uPlot; of a stack, the area between it and the one below, told with its own value. */
  line(s, points) {
    const tint = colour(s.colour);
    const common = { label: s.name, stroke: tint, value: (u, v, i, at) => this.told(s.name, v, at) };
    if (!this.options.stacked) return { ...common, width: 1.6, points: { show: points < 3 || this.options.points === true }, spanGaps: true };
    return { ...common, width: 0, fill: tint, points: { show: false }, paths: uPlot.paths.stepped({ align: -1 }) };
  }

  /** The value under the cursor as text; of a stack, what the series itself adds. */
  told(name, v, at) {
    const value = this.options.stacked && at !== null ? this.series.find((s) => s.name === name)?.y[at] : v;
    return at === null || value === null || value === undefined ? "–" : this.format(value);
  }

  zoomed(u) {
    const x = u.data[0];
    u.everything = !x.length || (u.scales.x.min <= x[0] && u.scales.x.max >= x[x.length - 1]);
  }

  draw(u) {
    const { ctx, bbox } = u;
    ctx.save();
    const seen = this.marks.filter((mark) => mark.x >= u.scales.x.min && mark.x <= u.scales.x.max);
    const many = seen.length > 40;
    for (const mark of seen) {
      const x = Math.round(u.valToPos(mark.x, "x", true)) + 0.5;
      const hard = HARD.has(mark.kind);
      ctx.strokeStyle = colour(hard ? "bad" : "soft");
      ctx.globalAlpha = hard ? (many ? 0.35 : 0.9) : many ? 0.15 : 0.45;
      ctx.setLineDash(hard ? [] : [3, 4]);
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
      if (!hard || many) continue;
      ctx.fillStyle = colour("bad");
      ctx.beginPath();
      ctx.moveTo(x - 5, bbox.top);
      ctx.lineTo(x + 5, bbox.top);
      ctx.lineTo(x, bbox.top + 8);
      ctx.fill();
    }
    ctx.restore();
  }

  point(u) {
    const { left } = u.cursor;
    if (left < 0) return;
    const near = this.marks
      .map((mark) => [Math.abs(u.valToPos(mark.x, "x") - left), mark])
      .filter(([distance]) => distance < 7)
      .sort((a, b) => a[0] - b[0])[0];
    if (near) write($("mark-text"), near[1].text);
  }

  fit() {
    const width = this.box.clientWidth;
    if (this.plot && width > 0 && Math.abs(width - this.plot.width) > 1) this.plot.setSize({ width, height: HEIGHT });
  }
}

/** Moments on an axis, as short as their span allows. */
function moments(u, ticks) {
  const span = u.scales.x.max - u.scales.x.min;
  const day = { day: "numeric", month: "short" }, minute = { hour: "2-digit", minute: "2-digit" };
  const form = span > 172800 ? day : span > 36000 ? { ...day, ...minute } : span > 900 ? minute : { ...minute, second: "2-digit" };
  return ticks.map((t) => new Date(1000 * t).toLocaleString("en-GB", { hour12: false, ...form }));
}

/** Running sums over the series, point by point. */
function stack(series) {
  const below = series[0]?.y.map(() => 0) ?? [];
  return series.map((s) => s.y.map((v, i) => (below[i] += v ?? 0)));
}

const column = (run, i) => run.curves.steps?.columns[i] ?? [];

/** Between neighbouring points: samples per second, seconds per step, samples per second and worker. */
function rates(run) {
  const x = run.curves.steps?.x ?? [], time = column(run, 0), samples = column(run, 5), workers = column(run, 6);
  const rate = [], seconds = [], each = [];
  for (let i = 0; i < x.length; i++) {
    const passed = i ? time[i] - time[i - 1] : 0;
    const valid = passed > 0;
    rate.push(valid ? samples[i] / passed : null);
    seconds.push(valid ? passed / Math.max(1, x[i] - x[i - 1]) : null);
    each.push(valid && workers[i] ? samples[i] / passed / workers[i] : null);
  }
  return { rate, seconds, each };
}

export class Training {
  constructor() {
    const root = $("charts");
    const zero = (u, low, high) => [0, high > 0 ? 1.08 * high : 1];
    this.axis = "step";
    this.loss = new Chart(root, "Loss");
    this.rate = new Chart(root, "Samples per second", (v) => number(v), { range: zero });
    this.lr = new Chart(root, "Learning rate", (v) => (v ? Number(v.toPrecision(3)).toString() : "0"), { range: zero });
    this.each = new Chart(root, "Samples per second and worker", (v) => number(v), { range: zero });
    this.seconds = new Chart(root, "Step time", (v) => (v ? duration(v) : "0"), { range: zero });
    this.phases = new Chart(root, "Step time by phase, per worker", (v) => (v ? duration(v) : "0"), { range: zero, stacked: true });
    this.bytes = new Chart(root, "Sent per second, by operation", (v) => (v ? `${bytes(Math.round(v))}/s` : "0"), { range: zero, stacked: true, width: 74 });
    this.scaling = new Chart(root, "Samples per second by number of workers", (v) => number(v), { range: zero, label: "workers", points: true });
    this.tests = new Map(); // by metric: one axis does not suit an accuracy and a loss
  }

  update(run) {
    const time = this.axis === "time";
    const x = time ? column(run, 0) : (run.curves.steps?.x ?? []);
    const marks = run.marks.map(([at, step, kind, , text]) => ({ x: time ? at : step, kind, text }));
    const timed = run.marks.map(([at, , kind, , text]) => ({ x: at, kind, text }));
    const { rate, seconds, each: single } = rates(run);
    const one = (chart, name, y, tint) => chart.update(x, x.length ? [{ name, y, colour: tint }] : [], time, marks);
    one(this.loss, "loss", column(run, 1), "c0");
    one(this.rate, "samples/s", rate, "c2");
    one(this.lr, "learning rate", column(run, 4), "c3");
    one(this.each, "per worker", single, "c4");
    one(this.seconds, "step", seconds, "c1");
    const usage = run.usage;
    const many = (chart, of, tint) => {
      const series = Object.entries(of ?? {}).map(([name, y], i) => ({ name, y: [null, ...y], colour: tint(name, i) }));
      const x = usage?.x ?? [];
      chart.update(x.length ? [x[0] - usage.width_s, ...x] : [], x.length ? series : [], true, timed); // each holds for the time before its x
    };
    many(this.phases, usage?.seconds, (name) => PHASE_COLOURS[name] ?? "c7");
    many(this.bytes, usage?.bytes_per_s, (name, i) => `c${i % 9}`);
    const scaled = run.efficiency.length > 1 ? run.efficiency : [];
    const each = scaled.length ? scaled[0].samples_per_s / scaled[0].workers : 0;
    const lines = [{ name: "measured", y: scaled.map((e) => e.samples_per_s), colour: "c2" }, { name: "in proportion", y: scaled.map((e) => each * e.workers), colour: "c7" }];
    this.scaling.update(scaled.map((e) => e.workers), scaled.length ? lines : [], false, []);
    const judged = run.marks.map(([, step, kind, , text]) => ({ x: step, kind, text }));
    const tests = Object.keys(run.curves).filter((name) => name.startsWith("eval:"));
    for (const name of tests) if (!this.tests.has(name)) this.tests.set(name, new Chart($("charts"), `Evaluated: ${name.slice(5)}`, (v) => number(v, 4), { points: true }));
    for (const [name, chart] of this.tests) {
      const curve = run.curves[name];
      chart.update(curve?.x ?? [], curve ? [{ name: name.slice(5), y: curve.columns[1], colour: "c4" }] : [], false, judged);
    }
  }
}

/** Loss and speed of all runs over each other. */
export class Overlay {
  constructor() {
    this.loss = new Chart($("overlay"), "Loss by step, all runs");
    this.rate = new Chart($("overlay"), "Samples per second by step, all runs", (v) => number(v));
  }

  update(runs) {
    const there = runs.filter((run) => run.curves.steps?.x.length);
    if (!there.length) return;
    this.drawn = true;
    const names = there.map((run) => `${runs.indexOf(run) + 1} ${run.head.name}`);
    const show = (chart, pick) => {
      const table = uPlot.join(there.map((run) => [run.curves.steps.x, pick(run)]));
      chart.update(table[0], names.map((name, i) => ({ name, y: table[i + 1], colour: `c${i % 9}` })), false, []);
    };
    show(this.loss, (run) => column(run, 1));
    show(this.rate, (run) => rates(run).rate);
  }
}
