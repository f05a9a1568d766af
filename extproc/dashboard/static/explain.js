// A pasted request: tokens, blocks, who holds them, whom each scorer would choose.

import { Unauthorized, ask } from "./api.js";
import { blockGrid } from "./charts.js";
import { outside } from "./decisions.js";
import { byId, cost, count, el, number, percent, plural, setText } from "./dom.js";

const SHOWN_TOKENS = 512;
const SHOWN_HOLDERS = 16;
const USES = { pool: "the pool's own", allowed: "may be asked for", default: "default parameters" };

export class Explain {
  constructor(onUnauthorized) {
    byId("explain-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.run().catch((error) => {
        if (error instanceof Unauthorized) onUnauthorized();
        else setText(byId("explain-status"), error instanceof TypeError ? "kvcar cannot be reached" : error.message);
      });
    });
    byId("explain-input").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) byId("explain-form").requestSubmit();
    });
    byId("explain-mode").addEventListener("input", () => (byId("explain-model").disabled = byId("explain-mode").value === "json"));
  }

  models(pools) {
    const select = byId("explain-model");
    const names = pools.flatMap((pool) => pool.models);
    if (names.join("\n") === [...select.options].map((option) => option.value).join("\n")) return;
    const chosen = select.value;
    select.replaceChildren(...names.map((name) => el("option", { value: name }, name)));
    if (names.includes(chosen)) select.value = chosen;
  }

  body() {
    const text = byId("explain-input").value;
    const model = byId("explain-model").value;
    switch (byId("explain-mode").value) {
      case "json": return text;
      case "text": return JSON.stringify({ model, prompt: text });
      default: return JSON.stringify({ model, messages: [{ role: "user", content: text }] });
    }
  }

  async run() {
    if (!byId("explain-input").value.trim()) {
      byId("explain-input").focus();
      return setText(byId("explain-status"), "Nothing to explain: the field is empty.");
    }
    setText(byId("explain-status"), "asking …");
    let found;
    try {
      found = await ask(`/v1/internal/explain?tokens=${SHOWN_TOKENS}`, { body: this.body() });
    } catch (error) {
      byId("explain-result").replaceChildren();
      throw error;
    }
    setText(byId("explain-status"), found.reason ? "" : "done");
    byId("explain-result").replaceChildren(...(found.reason ? refused(found) : answer(found)));
  }
}

function refused(found) {
  const detail = found.detail ? `: ${found.detail}` : "";
  return [el("p", { class: "why" }, `Would pass unscored: ${found.reason}${detail}. The engine still gets such a request, by Envoy's own balancing.`)];
}

function answer(found) {
  const own = found.scorers.find((row) => row.use === "pool");
  const notes = [
    !found.reads_cache && "the engine reads no prefix cache for this request, so nothing can be hit",
    found.block_size === null && "the block size is not known until an engine publishes an event",
    found.truncated && "cut to the requested length",
    found.partial && "media follow: only the text before them is compared, the length is estimated",
    found.salted && "has a cache salt",
    found.adapter && `adapter ${found.adapter}`,
    found.block_size && !found.blocks && found.reads_cache && "too short for a whole block",
  ].filter(Boolean);
  const facts = [["Tokens", count(found.tokens)], ["Blocks", found.block_size ? `${count(found.blocks)} of ${found.block_size}` : "–"], ["Pool", found.pool], ["Goes to", own?.chosen ?? "nobody"], ["Predicted hit", own?.chosen ? `${count(own.hit_tokens)} (${percent(own.hit_tokens / Math.max(1, found.tokens))})` : "–"]];
  return [
    el("dl", { class: "tiles small" }, ...facts.map(([name, value]) => el("div", null, el("dt", null, name), el("dd", { class: "num", "data-fact": name }, value)))),
    notes.length ? el("p", { class: "muted" }, `Note: ${notes.join("; ")}.`) : null,
    el("h3", null, "Whom each scorer would choose"), scorers(found),
    el("h3", null, "Who holds its blocks"), holders(found),
    el("h3", null, "Tokens"), tokens(found),
  ].filter(Boolean);
}

function scorers(found) {
  const heads = ["Scorer", "Chooses", "Hit", "Cost", "Next best", "Remark"];
  return el("div", { class: "scroll" }, el("table", { id: "scorers" },
    el("thead", null, el("tr", null, ...heads.map((text, i) => el("th", { scope: "col", class: i === 2 || i === 3 ? "r" : null }, text)))),
    el("tbody", null, ...found.scorers.map((row) => {
      const best = row.costs.find(([name]) => name === row.chosen || name.startsWith(`${row.chosen}/`));
      const next = row.costs.find((pair) => pair !== best);
      const remark = row.reason ? `${row.reason}: ${row.detail}` : row.tied.length ? `${row.tied.length} are equal and take turns` : row.detail;
      const out = outside(row.excluded);
      return el("tr", { class: row.use === "pool" ? "chosen" : null, "data-scorer": row.name },
        el("th", { scope: "row" }, row.name, el("small", null, USES[row.use])),
        el("td", { class: "name-cell" }, row.chosen ? (row.decode ? `${row.chosen} → ${row.decode}` : row.chosen) : "nobody"),
        el("td", { class: "r" }, count(row.hit_tokens)), el("td", { class: "r" }, best ? cost(best[1]) : "–"),
        el("td", null, next ? `${next[0]} (${cost(next[1])})` : "–"), el("td", { class: "prose" }, remark, out ? el("small", null, out.textContent) : null));
    }))));
}

const held = (rank) => rank[0] + rank[1] + rank[2];
// an instance is as good as its worst rank
const least = (one) => one.ranks.reduce((a, b) => (held(b) < held(a) ? b : a), one.ranks[0] ?? [0, 0, 0]);

function holders(found) {
  if (!found.blocks) return el("p", { class: "muted" }, "There is no whole block to hold.");
  const sorted = found.instances.slice().sort((a, b) => held(least(b)) - held(least(a)) || a.name.localeCompare(b.name, "en", { numeric: true }));
  const having = sorted.filter((one) => one.ranks.some((rank) => held(rank)));
  const shown = (having.length ? having : sorted).slice(0, SHOWN_HOLDERS);
  const rows = shown.flatMap((one) => one.ranks.map((rank, i) => el("tr", { "data-holder": one.ranks.length > 1 ? `${one.name}/${i}` : one.name },
    el("th", { scope: "row" }, one.ranks.length > 1 ? `${one.name}/${i}` : one.name),
    el("td", null, blockGrid(rank, found.blocks)),
    el("td", { class: "r" }, `${held(rank)} of ${found.blocks}`),
    el("td", { class: "r" }, number(one.waiting)), el("td", { class: "r" }, count(one.in_flight)))));
  const rest = found.instances.length - shown.length;
  return el("div", { class: "scroll" }, el("table", { id: "holders" }, el("thead", null, el("tr", null, el("th", { scope: "col" }, "Instance"),
    el("th", { scope: "col" }, "Blocks from the first on, by tier"), el("th", { scope: "col", class: "r" }, "Blocks"), el("th", { scope: "col", class: "r" }, "Waiting"), el("th", { scope: "col", class: "r" }, "In flight"))),
    el("tbody", null, ...rows)), rest > 0 ? el("p", { class: "muted" }, `${plural(rest, "other instance")} ${having.length > SHOWN_HOLDERS ? "hold less" : rest === 1 ? "holds none of them" : "hold none of them"}.`) : null);
}

/** Chips with text and id, a frame around each block. */
function tokens(found) {
  const size = found.block_size ?? found.ids.length;
  const box = el("div", { class: "tokens", id: "tokens" });
  for (let start = 0; start < found.ids.length; start += size || 1) {
    const ids = found.ids.slice(start, start + size);
    const number = start / size;
    const whole = found.block_size && number < found.blocks;
    box.append(el("span", { class: `block${whole ? "" : " open-end"}`, title: whole ? `block ${number + 1}` : "no whole block, or the last token: always computed" },
      ...(found.block_size ? [el("span", { class: "block-number" }, whole ? String(number + 1) : "–")] : []),
      ...ids.map((id, i) => el("span", { class: `token tint${(start + i) % 4}` }, el("span", { class: "text" }, visible(found.texts?.[start + i])), el("small", null, String(id))))));
  }
  const rest = found.tokens - found.ids.length;
  if (rest > 0) box.append(el("span", { class: "muted" }, ` and ${count(rest)} more`));
  return box;
}

/** Spaces and line ends as signs, so that every chip shows what is in it. */
function visible(text) {
  if (text === undefined || text === null) return "·";
  return text.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replaceAll(" ", "·") || "∅";
}
