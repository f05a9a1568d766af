// The fleet: a dense table that sorts and filters; rows are made once and updated in place.

import { TIERS, spark, tierBar } from "./charts.js";
import { byId, compact, count, el, number, percent, plural, reconcile, setAttr, setClass, setText } from "./dom.js";

const held = (one) => TIERS.reduce((sum, tier) => sum + one.blocks[tier], 0);
const COLUMNS = [
  { key: "name", text: "Instance", value: (one) => one.name },
  { key: "role", text: "Role", value: (one) => one.role, css: "w" },
  { key: "state", text: "State", value: (one) => one.state },
  { key: "synchronized", text: "Streams", value: (one) => one.synchronized / Math.max(1, one.streams), css: "r w", hint: "synchronized of all event streams" },
  { key: "blocks", text: "Cache by tier", value: held, hint: "blocks announced; the fullest instance is the full bar" },
  { key: "held", text: "Blocks", value: held, css: "r" },
  { key: "in_flight", text: "In flight", value: (one) => one.in_flight, css: "r", hint: "requests sent by Envoy and not finished" },
  { key: "waiting", text: "Waiting", value: (one) => one.load?.waiting ?? -1, css: "r w", hint: "requests queued, by the pool's load source" },
  { key: "usage", text: "KV used", value: (one) => one.load?.usage ?? -1, css: "r w", hint: "KV cache in use, as the engine reports it" },
  { key: "spark", text: "Load, 15 min", css: "w" },
  { key: "chosen", text: "Chosen", value: (one) => one.chosen, css: "r", hint: "decisions since the start" },
];

export class Fleet {
  constructor() {
    this.sort = { key: "name", down: false };
    this.body = byId("fleet-table").tBodies[0];
    this.heads = new Map();
    const row = el("tr");
    for (const column of COLUMNS) {
      const head = el("th", { scope: "col", class: column.css, title: column.hint });
      if (column.value) {
        head.append(el("button", { type: "button", class: "sort", onclick: () => this.order(column.key) }, column.text));
        this.heads.set(column.key, head);
      } else head.append(column.text);
      row.append(head);
    }
    byId("fleet-table").tHead.append(row);
    for (const id of ["fleet-filter", "fleet-role", "fleet-state"]) byId(id).addEventListener("input", () => this.draw());
  }

  order(key) {
    this.sort = { key, down: this.sort.key === key ? !this.sort.down : !["name", "role", "state"].includes(key) };
    this.draw();
  }

  show(instances, past, manyPools, sizes) {
    Object.assign(this, { instances, past, manyPools, sizes });
    options(byId("fleet-role"), "any role", instances.map((one) => one.role));
    options(byId("fleet-state"), "any state", instances.map((one) => one.state));
    this.draw();
  }

  draw() {
    if (!this.instances) return;
    const words = byId("fleet-filter").value.trim().toLowerCase();
    const role = byId("fleet-role").value, state = byId("fleet-state").value;
    const shown = this.instances.filter((one) =>
      (!words || `${one.name} ${one.address} ${one.pool}`.toLowerCase().includes(words)) &&
      (!role || one.role === role) && (!state || one.state === state));
    const { value } = COLUMNS.find((column) => column.key === this.sort.key);
    const turn = this.sort.down ? -1 : 1;
    shown.sort((a, b) => {
      const x = value(a), y = value(b);
      const order = typeof x === "string" ? x.localeCompare(y, "en", { numeric: true }) : x - y;
      return turn * order || a.name.localeCompare(b.name, "en", { numeric: true });
    });
    for (const [key, head] of this.heads) {
      setAttr(head, "aria-sort", key !== this.sort.key ? "none" : this.sort.down ? "descending" : "ascending");
    }
    const all = this.instances.length;
    setText(byId("fleet-count"), shown.length === all ? plural(all, "instance") : `${count(shown.length)} of ${plural(all, "instance")}`);
    setClass(byId("fleet-table"), all > 24 ? "dense" : "");
    const most = Math.max(1, ...this.instances.map(held));
    reconcile(this.body, shown, (one) => `${one.pool} ${one.name}`, create, (row, one) => this.update(row, one, most));
  }

  update(row, one, most) {
    const cells = row.parts;
    setText(cells.address, this.manyPools ? `${one.address} · ${one.pool}` : one.address);
    setText(cells.role, one.role);
    const unhealthy = one.state !== "active";
    setText(cells.state, one.load ? one.state : `${one.state}, no load report`);
    setClass(cells.state, `badge ${unhealthy ? "bad" : one.load ? "ok" : "warn"}`);
    setText(cells.streams, one.streams ? `${one.synchronized}/${one.streams}` : "none");
    setClass(cells.streams, one.synchronized < one.streams ? "warn-text" : "");
    const tokens = this.sizes.get(one.pool);
    tierBar(cells.blocks, one.blocks, most, tokens ? ` blocks; ${compact(held(one) * tokens)} tokens` : " blocks");
    setText(cells.held, count(held(one)));
    setText(cells.in_flight, count(one.in_flight));
    setText(cells.waiting, one.load ? number(one.load.waiting) : "–");
    setText(cells.usage, one.load && one.load.usage ? percent(one.load.usage) : "–");
    setText(cells.chosen, count(one.chosen));
    const { past } = this;
    spark(cells.spark, past.loads.get(one.name) ?? [], 900 / past.step / past.group, Math.floor(past.tick / past.group));
  }
}

function create(one) {
  const parts = {
    address: el("small"), role: el("td", { class: "w" }), state: el("span"), streams: el("span"), blocks: el("td", { class: "bar" }),
    held: el("td", { class: "r" }), in_flight: el("td", { class: "r" }), waiting: el("td", { class: "r w" }),
    usage: el("td", { class: "r w" }), spark: el("td", { class: "w" }), chosen: el("td", { class: "r" }),
  };
  const row = el("tr", { "data-instance": one.name },
    el("th", { scope: "row" }, el("span", { class: "name", title: one.name }, one.name), parts.address),
    parts.role, el("td", null, parts.state), el("td", { class: "r w" }, parts.streams), parts.blocks, parts.held,
    parts.in_flight, parts.waiting, parts.usage, parts.spark, parts.chosen);
  row.parts = parts;
  return row;
}

/** The choices of a select: the first for all, then each value once; a chosen one stays. */
export function options(select, first, values) {
  const wanted = [...new Set(values)].sort();
  const known = [...select.options].slice(1).map((option) => option.value);
  if (wanted.length === known.length && wanted.every((value, i) => value === known[i])) return;
  const chosen = select.value;
  select.replaceChildren(el("option", { value: "" }, first), ...wanted.map((value) => el("option", { value }, value)));
  select.value = wanted.includes(chosen) ? chosen : "";
}
