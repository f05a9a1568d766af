// Event streams: first what is wrong and what to do, then the whole list.

import { byId, count, duration, el, plural, reconcile, setClass, setText } from "./dom.js";

const NAMES = 8;
export const CALM = new Set(["empty", "fetch", "incomplete"]);
const title = (stream) => `${stream.instance}/${stream.dp_rank}`;

export function showStreams(streams, remedies) {
  const good = streams.filter((stream) => stream.synchronized).length;
  setText(byId("streams-count"), `${count(good)} of ${plural(streams.length, "stream")} synchronized`);
  const byProblem = new Map();
  for (const stream of streams) if (stream.problem) byProblem.set(stream.problem, [...(byProblem.get(stream.problem) ?? []), stream]);
  showProblems([...byProblem].map(([key, affected]) => ({ key, affected, ...remedies[key] }))
    .sort((a, b) => CALM.has(a.key) - CALM.has(b.key) || b.affected.length - a.affected.length), streams.length);
  const rows = streams.slice().sort((a, b) => Boolean(b.problem) - Boolean(a.problem));
  reconcile(byId("streams-table").tBodies[0], rows, (stream) => `${stream.pool} ${title(stream)}`, create, update);
}

function showProblems(problems, all) {
  const box = byId("problems");
  if (!box.table) {
    // roles by name: on narrow screens the rows are shown as blocks, which would take the table's meaning away
    box.table = el("tbody", { role: "rowgroup" });
    box.good = el("p", { class: "empty" });
    box.scroll = el("div", { class: "scroll" }, el("table", { role: "table", "aria-label": "Troubles and what to do" },
      el("thead", { role: "rowgroup" }, el("tr", { role: "row" },
        ...["Streams", "Reason", "What to do"].map((text) => el("th", { scope: "col", role: "columnheader" }, text)))), box.table));
    box.append(box.good, box.scroll);
  }
  box.good.hidden = problems.length > 0;
  box.scroll.hidden = problems.length === 0;
  setText(box.good, all ? "Every stream is synchronized and complete: predictions are the engines' own truth." : "No stream is configured: give instances an events endpoint.");
  reconcile(box.table, problems, (problem) => problem.key,
    (problem) => el("tr", { role: "row", "data-problem": problem.key }, el("th", { scope: "row", role: "rowheader" }, el("span", { class: `badge ${CALM.has(problem.key) ? "" : "bad"}` }), el("small")),
      el("td", { class: "prose", role: "cell" }, el("b"), el("small")), el("td", { class: "prose", role: "cell" })),
    (row, problem) => {
      const [who, why, todo] = row.cells;
      const names = problem.affected.map(title);
      setText(who.firstChild, names.length);
      setText(who.lastChild, names.slice(0, NAMES).join(", ") + (names.length > NAMES ? ` and ${names.length - NAMES} more` : ""));
      setText(why.firstChild, problem.title);
      setText(why.lastChild, problem.affected.find((stream) => stream.error)?.error ?? "");
      setText(todo, problem.remedy);
    });
}

function create(stream) {
  const cells = ["", "r", "r", "r", "r w", "r w", "w ellipsis", "prose"].map((css) => el("td", { class: css }));
  const state = el("span");
  cells[0].append(state);
  const row = el("tr", { "data-stream": title(stream) }, el("th", { scope: "row", class: "ellipsis", title: title(stream) }, title(stream)), ...cells);
  row.parts = { state, cells };
  return row;
}

function update(row, stream) {
  const { state, cells } = row.parts;
  const calm = !stream.problem || CALM.has(stream.problem);
  setText(state, stream.state);
  setClass(state, `badge ${stream.synchronized ? (calm ? "ok" : "warn") : calm ? "" : "bad"}`);
  const blocks = stream.blocks ?? {};
  [stream.sequence === null ? "–" : count(stream.sequence), duration(stream.event_age_seconds), count(blocks.device), count(blocks.host), count(blocks.disk),
    stream.endpoint, stream.error ?? (stream.complete ? "" : "without what the engine held before")].forEach((text, i) => setText(cells[i + 1], text));
  cells[6].title = stream.endpoint;
}
