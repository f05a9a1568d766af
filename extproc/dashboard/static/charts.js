// Drawn by hand: three lines with axes, sparklines, bars of tiers. Colours come from classes in style.css.

import { byId, clock, el, percent, plural, reconcile, setAttr, setText, svg } from "./dom.js";

export const TIERS = ["device", "host", "disk"];
const WINDOW = 60; // seconds that a point of the chart looks back
const SPAN = 900;
const KINDS = [
  { key: "available", index: 3, text: "available", hint: "best instance of the fleet" },
  { key: "chosen", index: 5, text: "chosen", hint: "predicted for the chosen instance" },
  { key: "delivered", index: 7, text: "delivered", hint: "the engine's own cached tokens" },
];

/** The history as the page keeps it: `totals` by pool, `loads` by instance, oldest first. */
export class Past {
  constructor() {
    this.clear();
  }

  clear() {
    this.tick = -1;
    this.step = 2;
    this.group = 5;
    this.totals = new Map();
    this.loads = new Map();
  }

  take(news) {
    ({ tick: this.tick, step: this.step, group: this.group } = news);
    const keep = SPAN / this.step;
    for (const [name, rows] of Object.entries(news.totals)) {
      const known = (this.totals.get(name) ?? []).concat(rows);
      this.totals.set(name, known.filter((row) => row[0] > this.tick - keep));
    }
    const groups = Math.floor(this.tick / this.group) - keep / this.group;
    for (const [name, points] of Object.entries(news.loads)) {
      const first = points[0][0];
      const known = (this.loads.get(name) ?? []).filter((point) => point[0] < first && point[0] > groups);
      this.loads.set(name, known.concat(points));
    }
  }

  /** Counters summed over the pools: [tick, scored, unscored, n, sum, n, sum, n, sum], by tick. */
  sums(pools) {
    const sums = new Map();
    for (const pool of pools) {
      for (const row of this.totals.get(pool) ?? []) {
        const sum = sums.get(row[0]);
        if (!sum) sums.set(row[0], row.slice());
        else for (let i = 1; i < row.length; i++) sum[i] += row[i];
      }
    }
    return [...sums.values()].sort((a, b) => a[0] - b[0]);
  }

  /** What happened within `seconds` before a row: differences of the counters, or null at the very beginning. */
  change(rows, at, seconds) {
    const before = rows[at][0] - seconds / this.step;
    let from = at;
    while (from > 0 && rows[from][0] > before) from--;
    return from === at ? null : rows[at].map((value, i) => value - rows[from][i]);
  }

  points(rows) {
    return rows.map((row, at) => {
      const change = this.change(rows, at, WINDOW);
      const recent = this.change(rows, at, 10);
      const point = { tick: row[0], scored: 0, unscored: 0 };
      for (const { key, index } of KINDS) point[key] = change && change[index] > 0 ? change[index + 1] / change[index] : null;
      if (recent) {
        const seconds = recent[0] * this.step;
        point.scored = Math.max(0, recent[1] / seconds);
        point.unscored = Math.max(0, recent[2] / seconds);
      }
      return point;
    });
  }
}

/** Ratio of a kind over the last `seconds`, null without requests. */
export function lately(past, rows, kind, seconds) {
  if (!rows.length) return null;
  const { index } = KINDS.find((one) => one.key === kind);
  const change = past.change(rows, rows.length - 1, seconds);
  return change && change[index] > 0 ? change[index + 1] / change[index] : null;
}

/** The chart of hit ratios, with a lane of request rates below. Redrawn as a whole: it is one picture. */
export class HitChart {
  constructor(box) {
    this.box = box;
    this.points = [];
    this.cursor = null;
    new ResizeObserver(() => this.draw()).observe(box);
    box.addEventListener("pointermove", (event) => this.point(event));
    box.addEventListener("pointerleave", () => this.move(null));
    box.addEventListener("blur", () => this.move(null));
    box.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
      if (step === undefined || !this.points.length) return;
      event.preventDefault();
      const last = this.points.length - 1;
      const from = this.cursor ?? last + 1;
      this.move(Math.max(0, Math.min(last, from + step * (event.shiftKey ? 15 : 5))));
    });
  }

  show(points, step, now) {
    Object.assign(this, { points, step, now });
    this.draw();
  }

  x(tick) {
    const newest = this.points.length ? this.points[this.points.length - 1].tick : 0;
    return this.left + this.wide * (1 - ((newest - tick) * this.step) / SPAN);
  }

  point(event) {
    if (!this.points.length) return;
    const at = event.clientX - this.box.getBoundingClientRect().left;
    let best = 0;
    this.points.forEach((point, i) => {
      if (Math.abs(this.x(point.tick) - at) < Math.abs(this.x(this.points[best].tick) - at)) best = i;
    });
    this.move(best);
  }

  move(cursor) {
    this.cursor = cursor;
    this.draw();
  }

  draw() {
    const width = this.box.clientWidth;
    if (!width) return;
    const high = 168, lane = 34, gap = 16, foot = 22, top = 8;
    this.left = 42;
    this.wide = width - this.left - 8;
    const y = (ratio) => top + high * (1 - ratio);
    const floor = top + high + gap + lane;
    const parts = [];
    for (const ratio of [0, 0.25, 0.5, 0.75, 1]) {
      parts.push(svg("line", { class: "grid", x1: this.left, x2: this.left + this.wide, y1: y(ratio), y2: y(ratio) }));
      parts.push(svg("text", { class: "tick", x: this.left - 6, y: y(ratio) + 4, "text-anchor": "end" }, `${ratio * 100}%`));
    }
    const every = width < 520 ? 5 : 3;
    for (let minute = 0; minute <= 15; minute += every) {
      const at = this.left + this.wide * (1 - minute / 15);
      parts.push(svg("line", { class: "grid", x1: at, x2: at, y1: top, y2: floor }));
      const anchor = minute === 0 ? "end" : minute === 15 ? "start" : "middle";
      parts.push(svg("text", { class: "tick", x: at, y: floor + 15, "text-anchor": anchor }, minute ? `−${minute} min` : "now"));
    }
    const most = Math.max(1, ...this.points.map((point) => point.scored + point.unscored));
    const bar = Math.max(1, (this.wide * this.step) / SPAN - 0.3);
    for (const { tick, scored, unscored } of this.points) {
      const at = this.x(tick) - bar;
      const up = (lane * scored) / most, more = (lane * unscored) / most;
      if (up) parts.push(svg("rect", { class: "rate", x: at, width: bar, y: floor - up, height: up }));
      if (more) parts.push(svg("rect", { class: "rate unscored", x: at, width: bar, y: floor - up - more, height: more }));
    }
    parts.push(svg("line", { class: "axis", x1: this.left, x2: this.left + this.wide, y1: floor, y2: floor }));
    parts.push(svg("text", { class: "tick", x: this.left - 6, y: floor - lane + 8, "text-anchor": "end" }, `${most < 10 ? most.toFixed(1) : most.toFixed(0)}/s`));
    for (const { key } of KINDS.toReversed()) {
      let path = "", open = false;
      for (const point of this.points) {
        if (point[key] === null) open = false;
        else {
          path += `${open ? "L" : "M"}${this.x(point.tick).toFixed(1)} ${y(Math.min(1, point[key])).toFixed(1)}`;
          open = true;
        }
      }
      if (path) parts.push(svg("path", { class: `series ${key}`, d: path }));
    }
    const shown = this.cursor === null ? null : this.points[this.cursor];
    if (shown) {
      const at = this.x(shown.tick);
      parts.push(svg("line", { class: "cursor", x1: at, x2: at, y1: top, y2: floor }));
      for (const { key } of KINDS) {
        if (shown[key] !== null) parts.push(svg("circle", { class: `dot ${key}`, cx: at, cy: y(Math.min(1, shown[key])), r: 3.5 }));
      }
    }
    const height = floor + foot;
    this.box.replaceChildren(svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true" }, ...parts));
    this.legend(shown);
  }

  legend(shown) {
    const point = shown ?? this.points[this.points.length - 1];
    const rows = [
      ...KINDS.map(({ key, text, hint }) => ({ key, text, hint, value: point ? percent(point[key]) : "–" })),
      { key: "rate", text: "scored", hint: "requests a second", value: point ? `${point.scored.toFixed(1)}/s` : "–" },
      { key: "rate unscored", text: "unscored", hint: "requests a second", value: point ? `${point.unscored.toFixed(1)}/s` : "–" },
    ];
    reconcile(byId("legend"), rows, (row) => row.key,
      (row) => el("li", { title: row.hint }, el("i", { class: `key ${row.key}` }), `${row.text} `, el("b", { class: "num", "data-kind": row.key })),
      (node, row) => setText(node.lastChild, row.value));
    const said = !shown ? "" : `${clock(this.now - (this.points[this.points.length - 1].tick - shown.tick) * this.step)}: ` +
      KINDS.map(({ key, text }) => `${text} ${percent(shown[key])}`).join(", ");
    setText(byId("reading"), said);
  }
}

/** A line of load: in flight filled, waiting above it. `points`: [[group, in flight, waiting]]. */
export function spark(node, points, groups, newest) {
  const width = 110, height = 24;
  const most = Math.max(1, ...points.map((point) => Math.max(point[1], point[2] ?? 0)));
  const x = (group) => (width * (1 - (newest - group) / groups)).toFixed(1);
  const y = (value) => (height - 1 - ((height - 3) * value) / most).toFixed(1);
  const line = (index) => points.filter((point) => point[index] !== null).map((point, i) => `${i ? "L" : "M"}${x(point[0])} ${y(point[index])}`).join("");
  if (!node.lines) {
    node.lines = ["area", "flight", "waiting"].map((name) => svg("path", { class: `spark ${name}` }));
    node.append(svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true" }, ...node.lines));
  }
  const flight = line(1);
  setAttr(node.lines[0], "d", points.length ? `${flight}L${x(points[points.length - 1][0])} ${height}L${x(points[0][0])} ${height}Z` : "");
  setAttr(node.lines[1], "d", flight);
  setAttr(node.lines[2], "d", line(2));
  setAttr(node, "title", points.length ? `last 15 min: at most ${most.toFixed(most < 10 ? 1 : 0)} requests` : "no samples yet");
}

/** A stacked bar of the tiers; `whole` is its full length, `mark` a place on it worth a line, if beyond the bar. */
export function tierBar(node, values, whole, extra = "", mark = 0) {
  if (!node.bars) {
    node.bars = TIERS.map((tier) => svg("rect", { class: tier, y: 0, height: 10 }));
    node.mark = svg("rect", { class: "mark", y: 0, width: 1, height: 10, visibility: "hidden" });
    node.append(svg("svg", { class: "tiers", viewBox: "0 0 100 10", preserveAspectRatio: "none", "aria-hidden": "true" },
      svg("rect", { class: "rest", width: 100, height: 10 }), ...node.bars, node.mark));
  }
  let at = 0;
  TIERS.forEach((tier, i) => {
    const part = whole > 0 ? Math.min(100 - at, (100 * values[tier]) / whole) : 0;
    setAttr(node.bars[i], "x", at.toFixed(2));
    setAttr(node.bars[i], "width", Math.max(0, part).toFixed(2));
    at += part;
  });
  setAttr(node.mark, "visibility", whole > 0 && (100 * mark) / whole > at + 0.5 ? "visible" : "hidden");
  setAttr(node.mark, "x", whole > 0 ? Math.min(99, (100 * mark) / whole).toFixed(2) : 0);
  setAttr(node, "title", TIERS.map((tier) => `${tier} ${values[tier].toLocaleString("en-US")}`).join(", ") + extra);
}

/** Cells of a prompt's blocks by tier: what an instance holds from the first block on. */
export function blockGrid([device, host, disk], blocks) {
  const cells = Math.min(blocks, 96), size = 9;
  const parts = [];
  for (let i = 0; i < cells; i++) {
    const block = (i * blocks) / cells; // above 96 blocks a cell stands for several
    const tier = block < device ? "device" : block < device + host ? "host" : block < device + host + disk ? "disk" : "rest";
    parts.push(svg("rect", { class: tier, x: (i % 48) * (size + 1), y: Math.floor(i / 48) * (size + 1), width: size, height: size, rx: 1.5 }));
  }
  const width = Math.min(48, Math.max(1, cells)) * (size + 1), height = Math.ceil(Math.max(1, cells) / 48) * (size + 1);
  const text = `${plural(device, "block")} on the device, ${host} on the host, ${disk} on disk, of ${blocks}`;
  return svg("svg", { class: "blocks", viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": text }, ...parts, svg("title", {}, text));
}
