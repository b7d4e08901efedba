// The list of runs: sorted by a column, filtered by a text, compared by ticking; tags and a note for each.

import { $, ago, attribute, clock, el, number, percent, plural, write } from "./dom.js";
import { post } from "./stream.js";
import { WORDS } from "./words.js";

const COLUMNS = [
  ["name", "run", (row) => row.name],
  ["state", "state", (row) => row.state],
  ["step", "step", (row) => row.step],
  ["loss", "loss", (row) => row.loss],
  ["goodput", "goodput", (row) => row.goodput],
  ["faults", "faults", (row) => row.faults],
  ["digest", "digest", (row) => row.digest],
  ["began", "began", (row) => row.began_ms],
  ["tags", "tags", (row) => row.tags.join(" ")],
  ["note", "note", (row) => row.note],
];
const NUMBERS = new Set(["step", "loss", "goodput", "faults"]);
const KEPT = "everstep-columns";
const MOST_COLUMNS = 8;

export class RunList {
  /** choose: called with the key of the run to show; ticked: called when other runs are to be compared; noted: whether
  notes may be written. */
  constructor(choose, ticked, noted) {
    this.choose = choose;
    this.ticked = ticked;
    this.noted = noted;
    this.rows = new Map();
    this.lines = new Map();
    this.ticks = new Set();
    this.by = "began";
    this.falling = true;
    this.silentS = null;
    this.settings = JSON.parse(localStorage.getItem(KEPT) ?? "[]").slice(0, MOST_COLUMNS); // keys that are columns
    this.heads = new Map(COLUMNS.map(([key, text]) => [key, this.head(key, text)]));
    this.body = el("tbody");
    this.header = el("tr");
    $("run-list").append(el("table", { className: "runs-table" }, el("thead", {}, this.header), this.body));
    $("columns").addEventListener("change", () => this.column($("columns").value));
    this.columns();
    $("run-filter").addEventListener("input", () => this.draw());
    $("run-filter-form").addEventListener("submit", (event) => event.preventDefault());
  }

  head(key, text) {
    const button = el("button", { type: "button", className: "sort", title: WORDS[key] ?? "", onclick: () => this.sort(key) }, text);
    return el("th", { scope: "col", className: NUMBERS.has(key) ? "n" : "" }, button);
  }

  /** Head cells: those of all runs, and one for each setting that is a column. */
  columns() {
    const first = el("th", { scope: "col" }, el("span", { className: "hidden-text" }, "compare"));
    for (const key of [...this.heads.keys()]) if (key.startsWith("set:") && !this.settings.includes(key.slice(4))) this.heads.delete(key);
    for (const key of this.settings) if (!this.heads.has(`set:${key}`)) this.heads.set(`set:${key}`, this.head(`set:${key}`, key));
    this.header.replaceChildren(first, ...this.heads.values());
  }

  /** Make a setting a column, or no longer. */
  column(key) {
    if (!key) return;
    this.settings = this.settings.includes(key) ? this.settings.filter((other) => other !== key) : [...this.settings, key].slice(-MOST_COLUMNS);
    localStorage.setItem(KEPT, JSON.stringify(this.settings));
    if (this.by.startsWith("set:") && !this.settings.includes(this.by.slice(4))) this.by = "began";
    this.columns();
    this.draw();
  }

  /** The settings that runs name, to choose columns from. */
  choices() {
    const keys = [...new Set([...this.rows.values()].flatMap((row) => Object.keys(row.settings)))].sort();
    const signature = JSON.stringify([keys, this.settings]);
    $("column-choice").hidden = !keys.length;
    if (this.chosen === signature) return;
    this.chosen = signature;
    $("columns").replaceChildren(el("option", { value: "" }, "a setting …"), ...keys.map((key) => el("option", { value: key }, `${this.settings.includes(key) ? "✓ " : ""}${key}`)));
  }

  sort(key) {
    this.falling = this.by === key ? !this.falling : key === "began" || NUMBERS.has(key);
    this.by = key;
    this.draw();
  }

  take({ rows, gone }) {
    for (const [key, row] of Object.entries(rows)) this.rows.set(key, row);
    for (const key of gone) {
      this.rows.delete(key);
      this.lines.get(key)?.node.remove();
      this.lines.delete(key);
    }
    this.draw();
  }

  /** silentS: for how many seconds the dashboard has not been heard of; null: it is there. */
  age(silentS) {
    if (silentS === null && this.silentS === null) return;
    this.silentS = silentS;
    this.draw();
  }

  /** ticks: keys of the runs that are compared; current: key of the shown run. */
  mark(ticks, current) {
    this.ticks = new Set(ticks);
    this.current = current;
    this.draw();
  }

  draw() {
    const setting = this.by.startsWith("set:") ? this.by.slice(4) : null;
    const value = setting === null ? COLUMNS.find(([key]) => key === this.by)[2] : (row) => comparable(row.settings[setting]);
    const words = $("run-filter").value.trim().toLowerCase().split(/\s+/).filter(Boolean);
    const found = [...this.rows].filter(([, row]) => words.every((word) => meant(row, word)));
    this.choices();
    this.alike = new Map();
    for (const row of this.rows.values()) if (row.digest) this.alike.set(row.digest, [...(this.alike.get(row.digest) ?? []), row.name]);
    found.sort(([a, one], [b, other]) => order(value(one), value(other), this.falling) || (a < b ? -1 : 1));
    for (const [key, th] of this.heads) attribute(th, "aria-sort", key === this.by ? (this.falling ? "descending" : "ascending") : "none");
    const nodes = found.map(([key, row]) => this.line(key, row));
    const now = [...this.body.children];
    if (nodes.length !== now.length || nodes.some((node, i) => node !== now[i])) {
      const focused = this.body.contains(document.activeElement) ? document.activeElement : null;
      this.body.replaceChildren(...nodes);
      focused?.focus({ preventScroll: true });
    }
    const heard = this.silentS === null ? "" : `, last heard of ${ago(0, 1000 * Math.max(2, this.silentS))}`;
    write($("run-count"), `${words.length ? `${found.length} of ` : ""}${plural(this.rows.size, "run")}${heard}`);
  }

  line(key, row) {
    const line = this.lines.get(key) ?? this.made(key);
    const { cells } = line;
    const alike = this.alike.get(row.digest) ?? [], digest = row.digest ? `${row.digest.slice(0, 12)}${alike.length > 1 ? ` (${alike.length} equal)` : ""}` : "–";
    const texts = [null, `${this.silentS !== null && row.running ? "was " : ""}${row.state}${row.disk_trouble ? ", disk trouble" : ""}`, `${row.step}${row.total ? ` / ${row.total}` : ""}`, row.loss_text || "–", percent(row.goodput), row.began_ms || row.step ? String(row.faults) : "–", digest, row.began_ms ? began(row.began_ms) : "–"];
    write(line.link, row.name);
    attribute(line.link, "aria-current", String(key === this.current));
    attribute(line.link, "title", row.task);
    texts.forEach((text, i) => i && write(cells[i], text));
    attribute(cells[1], "data-state", row.state);
    attribute(cells[1], "data-level", row.said.level);
    attribute(cells[1], "title", row.said.text);
    attribute(cells[3], "data-level", row.level);
    attribute(cells[6], "title", alike.length > 1 ? `${row.digest}: equal to the bit: ${alike.slice(0, 12).join(", ")}` : row.digest);
    const own = this.settings.map((key) => row.settings[key] ?? "–"), signature = own.join("\n");
    if (line.own !== signature) {
      line.own = signature;
      line.node.replaceChildren(...[...line.node.children].slice(0, 1 + COLUMNS.length), ...own.map((text) => el("td", {}, text)));
    }
    if (line.tick.checked !== this.ticks.has(key)) line.tick.checked = this.ticks.has(key);
    attribute(line.tick, "aria-label", `compare ${row.name}`);
    const noted = JSON.stringify([row.tags, row.note]);
    if (line.noted !== noted) {
      line.noted = noted;
      cells[8].replaceChildren(...row.tags.map((tag) => el("span", { className: "tag" }, tag)));
      line.text.textContent = row.note;
      attribute(line.edit, "aria-label", `tags and note of ${row.name}`);
    }
    return line.node;
  }

  made(key) {
    const tick = el("input", { type: "checkbox", onchange: () => this.ticked(key, tick.checked) });
    const link = el("button", { type: "button", className: "run-name", onclick: () => this.choose(key) });
    const edit = el("button", { type: "button", className: "quiet small-button", onclick: () => this.editing(key) }, "edit");
    const text = el("span", { className: "note-text" });
    const cells = COLUMNS.map(([name]) => el("td", { className: NUMBERS.has(name) ? "n" : name === "digest" ? "digest" : "" }));
    cells[0].append(link);
    cells[9].append(text, " ", edit);
    const line = { node: el("tr", {}, el("td", {}, tick), ...cells), cells, tick, link, edit, text };
    this.lines.set(key, line);
    return line;
  }

  /** Tags and note of a run, in a form below the list. */
  editing(key) {
    const row = this.rows.get(key), form = $("note-form");
    const tags = el("input", { id: "note-tags", value: row.tags.join(", "), maxLength: 500 }), note = el("input", { id: "note-note", value: row.note, maxLength: 2000 });
    const said = el("span", { className: "answer", role: "status" }, this.noted() ? "" : "unlock the actions of a run first");
    const close = () => {
      form.hidden = true;
      this.lines.get(key)?.edit.focus({ preventScroll: true });
    };
    form.replaceChildren(
      el("strong", {}, row.name),
      el("label", {}, "Tags, with commas between them", tags),
      el("label", {}, "Note", note),
      el("div", { className: "row" }, el("button", { type: "submit" }, "Keep"), el("button", { type: "button", onclick: close }, "Leave"), said),
    );
    form.onsubmit = async (event) => {
      event.preventDefault();
      const result = await post("/api/notes", { key, tags: tags.value.split(",").map((tag) => tag.trim()).filter(Boolean), note: note.value });
      if (result.ok) return close();
      write(said, result.error);
      said.className = "answer bad";
    };
    form.onkeydown = (event) => event.key === "Escape" && close();
    form.hidden = false;
    tags.focus();
  }
}

/** Whether a word names this run: part of what it says, or key=value of one of its settings (steps=50 is not steps=500). */
function meant(row, word) {
  const said = `${row.name} ${row.task} ${row.state} ${row.tags.join(" ")} ${row.note} ${row.digest}`.toLowerCase();
  const settings = Object.entries(row.settings).map(([key, value]) => `${key}=${value}`.toLowerCase());
  return said.includes(word) || settings.some((one) => (word.includes("=") ? one === word || one.endsWith(`.${word}`) : one.includes(word)));
}

/** A setting's value, as a number if it is one. */
const comparable = (text) => (text === undefined || text === "" || !isFinite(text) ? text : Number(text));

function order(one, other, falling) {
  const none = (value) => value === null || value === undefined || value === "";
  if (none(one) || none(other)) return none(one) - none(other); // what is not known comes last
  const by = typeof one === "number" ? one - other : String(one).localeCompare(String(other), "en", { numeric: true });
  return falling ? -by : by;
}

const began = (ms) => `${new Date(ms).toLocaleDateString("en-GB", { day: "numeric", month: "short" })} ${clock(ms).slice(0, 5)}`;
