// Live decisions; a row opens to every candidate with hits, load and cost.

import { ask } from "./api.js";
import { tierBar } from "./charts.js";
import { byId, clock, cost, count, el, number, percent, plural, reconcile, setClass, setText } from "./dom.js";

const COLUMNS = 10;

export class Decisions {
  constructor() {
    this.body = byId("decisions-table").tBodies[0];
    for (const id of ["decisions-filter", "decisions-kind"]) byId(id).addEventListener("input", () => this.draw());
  }

  show(rows, seen) {
    Object.assign(this, { rows, seen });
    this.draw();
  }

  draw() {
    if (!this.rows) return;
    const words = byId("decisions-filter").value.trim().toLowerCase();
    const kind = byId("decisions-kind").value;
    const fits = {
      "": () => true,
      scored: (row) => row.reason === null,
      unscored: (row) => row.reason !== null,
      elsewhere: (row) => row.elsewhere,
      differs: (row) => row.cached_tokens !== null && row.cached_tokens !== row.hit_tokens,
    }[kind];
    const shown = this.rows.filter((row) => fits(row) &&
      (!words || [row.chosen, row.decode, row.model, row.request_id, row.reason, row.scorer].join(" ").toLowerCase().includes(words)));
    setText(byId("decisions-count"), this.seen ? `last ${shown.length} of ${count(this.seen)}` : "");
    byId("decisions-empty").hidden = shown.length > 0;
    setText(byId("decisions-empty"), this.seen ? "None of the latest fits the filter." : "No request has come through yet. Send one through Envoy, or explain one below.");
    reconcile(this.body, shown, (row) => row.number, (row) => create(row), update);
  }
}

function create(row) {
  const parts = { bar: el("td", { class: "bar" }) };
  const cell = (name, css) => (parts[name] = el("td", { class: css }));
  const button = el("button", { type: "button", class: "open", "aria-expanded": "false" }, clock(row.at));
  const line = el("tr", { "data-number": row.number, "data-reason": row.reason ?? "" },
    el("th", { scope: "row" }, button), cell("chosen", "name-cell"), parts.bar, cell("prompt", "r"),
    cell("predicted", "r"), cell("engine", "r"), cell("scorer", "w"), cell("model", "w ellipsis"), cell("took", "r w"), cell("status", "r"));
  line.parts = parts;
  button.addEventListener("click", () => toggle(line, button));
  return line;
}

function update(line, row) {
  const { parts } = line;
  setText(parts.chosen, row.chosen ? (row.decode ? `${row.chosen} → ${row.decode}` : row.chosen) : `unscored: ${row.reason}`);
  setClass(parts.chosen, row.chosen ? `name-cell${row.elsewhere ? " warn-text" : ""}` : "name-cell muted");
  if (row.elsewhere) parts.chosen.title = `served by ${row.served}`;
  if (row.prompt_tokens !== null) tierBar(parts.bar, { device: row.hit_tokens, host: 0, disk: 0 }, row.prompt_tokens, ` tokens of ${row.prompt_tokens}; best available ${row.available}`, row.available);
  setText(parts.prompt, count(row.prompt_tokens));
  setText(parts.predicted, count(row.hit_tokens));
  setText(parts.engine, count(row.cached_tokens));
  setClass(parts.engine, row.cached_tokens !== null && row.cached_tokens !== row.hit_tokens ? "r warn-text" : "r");
  setText(parts.scorer, row.scorer || "–");
  setText(parts.model, row.model || "–");
  setText(parts.took, `${row.total_ms.toFixed(1)} ms`);
  setText(parts.status, row.status ?? "–");
}

async function toggle(line, button) {
  if (line.detail) {
    line.detail.remove();
    line.detail = null;
    button.setAttribute("aria-expanded", "false");
    return;
  }
  const cell = el("td", { colspan: COLUMNS }, "…");
  const id = `decision-${line.item.number}`;
  line.detail = el("tr", { class: "detail", id }, cell);
  line.after(line.detail);
  button.setAttribute("aria-expanded", "true");
  button.setAttribute("aria-controls", id);
  try {
    cell.replaceChildren(...explanation(await ask(`/v1/internal/decision?number=${line.item.number}`)));
  } catch (error) {
    cell.replaceChildren(el("p", { class: "bad-text" }, error.message || "kvcar cannot be reached"));
  }
}

/** In words first, then the candidates. */
function explanation(record) {
  const decision = record.decision;
  const facts = [["request id", record.request_id], ["path", record.path], ["served by", record.served],
    ["tokenized in", record.tokenize_ms ? `${record.tokenize_ms.toFixed(2)} ms` : null]].filter(([, value]) => value);
  const list = el("dl", { class: "facts" }, ...facts.flatMap(([name, value]) => [el("dt", null, name), el("dd", null, value)]));
  if (!decision || !decision.chosen) {
    const why = [record.reason, record.detail, decision?.detail].filter(Boolean).join(": ");
    return [el("p", { class: "why" }, `Passed on without a choice (${why}); Envoy balanced it as it does without kvcar.`), list,
      decision && outside(decision.excluded)].filter(Boolean);
  }
  const parts = [el("p", { class: "why" }, sentence(record, decision)), list, candidates(decision.candidates, decision), outside(decision.excluded)];
  if (decision.decode_candidates) parts.push(el("h3", null, "Decode candidates"), candidates(decision.decode_candidates, { chosen: decision.decode, tied: [] }), outside(decision.decode_excluded));
  return parts.filter(Boolean);
}

function sentence(record, decision) {
  const share = decision.prompt_tokens ? decision.hit_tokens / decision.prompt_tokens : 0;
  const why = [`${decision.chosen} had the lowest cost of ${plural(decision.candidates.length, "candidate")} by ${record.scorer}.`];
  if (decision.tied.length) why[0] = `${decision.chosen} was one of ${decision.tied.length} with the lowest cost by ${record.scorer}; equal ones take turns.`;
  why.push(`It holds ${count(decision.hit_tokens)} of ${count(decision.prompt_tokens)} prompt tokens (${percent(share)}).`);
  if (decision.best_available_hit > decision.hit_tokens) why.push(`Another one holds ${count(decision.best_available_hit)}, but its load outweighed that.`);
  if (decision.speculative_tokens) why.push(`${count(decision.speculative_tokens)} of them are not confirmed by an event yet.`);
  if (record.cached_tokens !== null) {
    why.push(record.cached_tokens === decision.hit_tokens ? "The engine found exactly as many." : `The engine found ${count(record.cached_tokens)}.`);
  }
  if (decision.detail) why.push(decision.detail);
  return why.join(" ");
}

const SHOWN = 12;

function candidates(rows, decision) {
  if (!rows.length) return el("p", { class: "muted" }, "No candidate.");
  const chosen = rows.findIndex((row) => row.name === decision.chosen);
  const shown = rows.slice(0, SHOWN);
  if (chosen >= SHOWN) shown.push(rows[chosen]);
  const heads = ["Candidate", "Cost", "Device", "Host", "Disk", "Waiting", "Running", "KV used", "Ours"];
  const table = el("table", { class: "inner" }, el("thead", null, el("tr", null, ...heads.map((text, i) => el("th", { scope: "col", class: i ? "r" : null }, text)))),
    el("tbody", null, ...shown.map((row) => el("tr", { class: row.name === decision.chosen ? "chosen" : null },
      el("th", { scope: "row" }, row.name, row.name === decision.chosen ? el("span", { class: "badge ok" }, "chosen") : null),
      ...[cost(row.cost), count(row.device_tokens), count(row.host_tokens), count(row.disk_tokens), number(row.waiting), number(row.running),
        row.usage === null ? "–" : percent(row.usage), count(row.requests)].map((text) => el("td", { class: "r" }, text))))));
  const rest = rows.length - shown.length;
  return el("div", { class: "scroll" }, table, rest > 0 ? el("p", { class: "muted" }, `and ${rest} more with higher costs; all at /decisions?request_id=…`) : null);
}

/** Who was no candidate, by cause. */
export function outside(excluded) {
  const causes = new Map();
  for (const [name, cause] of Object.entries(excluded ?? {})) causes.set(cause, [...(causes.get(cause) ?? []), name]);
  if (!causes.size) return null;
  const words = { state: "not active", role: "other role", excluded: "outside the gateway's subset", no_load: "no fresh load report", no_cost: "ruled out by the scorer" };
  return el("p", { class: "muted" }, "Not considered: " + [...causes].map(([cause, names]) =>
    `${words[cause] ?? cause}: ${names.slice(0, 6).join(", ")}${names.length > 6 ? ` and ${names.length - 6} more` : ""}`).join("; "));
}
