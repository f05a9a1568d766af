// The page: asks for the overview each two seconds, hands its parts on, and says so when it cannot.

import { Unauthorized, ask, forgetToken, hasToken, setToken } from "./api.js";
import { HitChart, Past, TIERS, lately } from "./charts.js";
import { Decisions } from "./decisions.js";
import { byId, clock, compact, count, duration, el, number, percent, plural, reconcile, setAttr, setClass, setText } from "./dom.js";
import { Explain } from "./explain.js";
import { Fleet, options } from "./fleet.js";
import { CALM, showStreams } from "./streams.js";

const INTERVAL = 2000;
const THEMES = ["auto", "light", "dark"];
const RECENT = 300; // seconds that the tiles look back

const past = new Past();
const chart = new HitChart(byId("chart"));
const fleet = new Fleet();
const decisions = new Decisions();
const explain = new Explain(askForToken);
let last = null; // the latest overview
let lastAt = 0; // when it came, by this machine's clock
let failure = null; // { since, text } while kvcar cannot be reached
let paused = false;
let waiting = 0; // timer of the next question
let asking = false;

// -- asking

async function poll() {
  clearTimeout(waiting);
  if (asking) return;
  asking = true;
  try {
    const found = await ask(`/v1/internal/overview?since=${past.tick}`);
    if (last && found.started !== last.started) {
      past.clear(); // another process: its ticks count anew
      if (found.history.tick >= 0) Object.assign(found, await ask("/v1/internal/overview?since=-1"));
    }
    past.take(found.history);
    last = found;
    lastAt = Date.now();
    failure = null;
    byId("token").hidden = true;
    byId("content").hidden = false;
    show();
  } catch (error) {
    if (error instanceof Unauthorized) return askForToken();
    const text = error instanceof TypeError || error.name === "TimeoutError" ? "kvcar cannot be reached" : `kvcar answers: ${error.message}`;
    failure = { since: failure?.since ?? Date.now(), text };
    if (!error.status && !(error instanceof TypeError) && error.name !== "TimeoutError") console.error(error);
  } finally {
    asking = false;
    frame();
  }
  schedule();
}

function schedule() {
  clearTimeout(waiting);
  if (!paused && !document.hidden && byId("token").hidden) waiting = setTimeout(poll, INTERVAL);
}

function askForToken() {
  setText(byId("token-error"), hasToken() ? "This token is not the right one." : "");
  forgetToken();
  byId("token").hidden = false;
  byId("content").hidden = true;
  byId("token-input").focus();
  frame();
}

// -- showing

function chosenPool() {
  return byId("pool").value;
}

function show() {
  options(byId("pool"), "all", last.pools.map((pool) => pool.name));
  byId("pool-choice").hidden = last.pools.length < 2;
  const only = chosenPool();
  const mine = (row) => !only || row.pool === only;
  const pools = last.pools.filter((pool) => !only || pool.name === only);
  const instances = last.instances.filter(mine);
  const streams = last.streams.filter(mine);
  const rows = past.sums(only ? [only] : ["", ...last.pools.map((pool) => pool.name)]);
  tiles(pools, instances, streams, rows);
  chart.show(past.points(rows), past.step, last.now);
  unscored();
  fleet.show(instances, past, last.pools.length > 1, new Map(last.pools.map((pool) => [pool.name, pool.block_size])));
  decisions.show(last.decisions.filter(mine), last.decisions_seen);
  showStreams(streams, last.remedies);
  explain.models(last.pools);
  setText(byId("version"), `${last.version} · up ${duration(last.uptime_seconds)}`);
}

function tiles(pools, instances, streams, rows) {
  const sum = (items, value) => items.reduce((total, item) => total + value(item), 0);
  const recent = rows.length ? past.change(rows, rows.length - 1, RECENT) : null;
  const scored = recent ? Math.max(0, recent[1]) : 0, passed = recent ? Math.max(0, recent[2]) : 0;
  const ratio = (kind) => percent(lately(past, rows, kind, RECENT));
  const blocks = TIERS.map((tier) => sum(instances, (one) => one.blocks[tier]));
  const troubled = streams.filter((stream) => stream.problem && !CALM.has(stream.problem)).length;
  const calm = streams.filter((stream) => CALM.has(stream.problem)).length;
  const times = last.decisions.filter((row) => row.chosen).map((row) => row.total_ms).sort((a, b) => a - b);
  const silent = instances.filter((one) => !one.load).length;
  const list = [
    { key: "hit", name: "Hit, chosen", value: ratio("chosen"), more: `available ${ratio("available")}, delivered ${ratio("delivered")}; 5 min` },
    { key: "requests", name: "Requests", value: count(scored + passed), more: `${count(passed)} unscored; 5 min` },
    { key: "instances", name: "Instances", value: count(instances.length), more: silent ? `${count(silent)} without a load report` : "all report their load", bad: silent > 0 },
    { key: "streams", name: "Streams synchronized", value: `${count(streams.filter((one) => one.synchronized).length)} / ${count(streams.length)}`, more: troubled ? `${count(troubled)} ${troubled === 1 ? "needs" : "need"} attention` : calm ? `${count(calm)} not complete yet` : "nothing to do", bad: troubled > 0 },
    { key: "flight", name: "In flight", value: count(sum(instances, (one) => one.in_flight)), more: `${number(sum(instances, (one) => one.load?.waiting ?? 0))} waiting` },
    { key: "blocks", name: "Blocks held", value: compact(blocks[0] + blocks[1] + blocks[2]), more: TIERS.map((tier, i) => `${tier} ${compact(blocks[i])}`).join(", ") },
    { key: "time", name: "Decision time", value: times.length ? `${times[Math.floor(times.length / 2)].toFixed(1)} ms` : "–", more: times.length ? `median of ${times.length}, most ${times[times.length - 1].toFixed(1)} ms` : "no decision yet" },
    { key: "scorer", name: pools.length === 1 ? "Scorer" : "Scorers", value: [...new Set(pools.map((pool) => pool.scorer))].join(", "), more: pools.length === 1 ? `blocks of ${pools[0].block_size ?? "unknown size"}` : plural(pools.length, "pool") },
  ];
  reconcile(byId("tiles"), list, (tile) => tile.key,
    (tile) => el("div", { "data-tile": tile.key }, el("dt"), el("dd", { class: "num value" }), el("dd", { class: "more num" })),
    (node, tile) => {
      [tile.name, tile.value, tile.more].forEach((text, i) => setText(node.children[i], text));
      setClass(node.children[2], `more num${tile.bad ? " warn-text" : ""}`);
    });
}

function unscored() {
  const box = byId("unscored-list");
  if (!box.list) {
    box.list = el("ul", { class: "reasons" });
    box.none = el("p", { class: "empty" }, "None: every request was scored.");
    box.append(box.none, box.list);
  }
  box.none.hidden = last.unscored.length > 0;
  const most = Math.max(1, ...last.unscored.map((row) => row.count));
  reconcile(box.list, last.unscored, (row) => row.reason,
    (row) => el("li", { "data-reason": row.reason }, el("span", { class: "reason" }, row.reason), el("b", { class: "num" }), el("meter", { min: 0, "aria-hidden": "true" }), el("small")),
    (node, row) => {
      setText(node.children[1], count(row.count));
      setAttr(node.children[2], "max", most);
      setAttr(node.children[2], "value", row.count);
      setText(node.children[3], row.remedy === "nothing" ? "nothing to do" : row.remedy);
    });
}

/** What stands above everything: banners, the replica's state, the age of what is shown. Each second. */
function frame() {
  const old = last ? Math.round((Date.now() - lastAt) / 1000) : 0;
  const list = [];
  if (failure) {
    const shown = last ? ` What is shown is ${duration(old)} old.` : "";
    list.push({ key: "unreachable", level: "bad", text: `${failure.text} since ${clock(failure.since / 1000)}.${shown} Trying again each two seconds.`, retry: true });
  }
  if (last && byId("token").hidden) list.push(...notices(last));
  reconcile(byId("banners"), list, (one) => one.key,
    (one) => el("p", { class: `banner ${one.level}`, "data-banner": one.key }, el("span"), one.retry ? el("button", { type: "button", onclick: poll }, "Try now") : null),
    (node, one) => setText(node.firstChild, one.text));
  const replica = byId("replica");
  const [text, css] = failure ? ["unreachable", "bad"] : !byId("token").hidden ? ["token needed", "warn"] : !last ? ["connecting", ""] : last.ready ? ["ready", "ok"] : ["not ready", "warn"];
  setText(replica, text);
  setClass(replica, `badge ${css}`);
  setText(byId("age"), !last ? "" : paused ? `paused, ${duration(old)} old` : failure || old > 4 ? `${duration(old)} old` : "live");
  document.body.classList.toggle("stale", Boolean(failure));
}

function notices(found) {
  const list = [];
  if (!found.ready) list.push({ key: "not-ready", level: "warn", text: "This replica is not ready: it is starting, draining, or its event threads have stopped. /readyz and the log say which." });
  if (found.reload_error) list.push({ key: "reload", level: "bad", text: `The changed configuration was refused, the one before goes on: ${found.reload_error}` });
  for (const { where, error } of found.troubles) list.push({ key: where, level: "bad", text: `${where}: ${error}` });
  for (const { name, self_verification: check } of found.pools) {
    if (check?.state === "drift") list.push({ key: `drift-${name}`, level: "bad", text: `Pool ${name}: predictions differ from what engines report. Likely cause: ${check.likely_cause}. What to do: ${check.remedy}.` });
  }
  for (const pool of found.pools) {
    if (!pool.tokenizer_loaded) list.push({ key: `tokenizer-${pool.name}`, level: "bad", text: `Pool ${pool.name} has no tokenizer: all but requests given as token ids pass unscored. The log of the start says why.` });
    if (pool.approximate) list.push({ key: `approximate-${pool.name}`, level: "warn", text: `Pool ${pool.name} is approximate: it counts what was sent, not what engines report.` });
  }
  const { instances, streams } = found.left_off;
  if (instances || streams) list.push({ key: "left-off", level: "warn", text: `Not shown: ${count(instances)} instances and ${count(streams)} streams. /status has them all.` });
  return list;
}

// -- controls

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  setText(byId("theme").lastChild, theme);
  localStorage.setItem("kvcar-theme", theme);
}

function nextTheme() {
  setTheme(THEMES[(THEMES.indexOf(document.documentElement.dataset.theme) + 1) % THEMES.length]);
}

function pause() {
  paused = !paused;
  setAttr(byId("pause"), "aria-pressed", paused);
  setText(byId("pause"), paused ? "Go on" : "Pause");
  if (paused) clearTimeout(waiting);
  else poll();
  frame();
}

function go(id, focus) {
  byId(id).scrollIntoView({ block: "start" });
  byId(focus ?? id).focus({ preventScroll: Boolean(focus) });
}

const SHORTCUTS = {
  "/": () => go("fleet", "fleet-filter"),
  e: () => go("explain", "explain-input"),
  h: () => go("hits"),
  f: () => go("fleet"),
  d: () => go("decisions"),
  s: () => go("streams"),
  p: pause,
  t: nextTheme,
  "?": () => byId("help").showModal(),
};

document.addEventListener("keydown", (event) => {
  const typing = event.target.closest("input, textarea, select");
  if (event.key === "Escape" && typing) typing.blur();
  if (typing || event.ctrlKey || event.metaKey || event.altKey || byId("help").open) return;
  const act = SHORTCUTS[event.key];
  if (act) {
    event.preventDefault();
    act();
  }
});
document.addEventListener("visibilitychange", () => (document.hidden ? clearTimeout(waiting) : !paused && byId("token").hidden && poll()));
byId("pause").addEventListener("click", pause);
byId("theme").addEventListener("click", nextTheme);
byId("help-button").addEventListener("click", SHORTCUTS["?"]);
byId("pool").addEventListener("input", () => last && show());
byId("token-form").addEventListener("submit", (event) => {
  event.preventDefault();
  setToken(byId("token-input").value);
  byId("token-input").value = "";
  byId("token").hidden = true;
  poll();
});

setTheme(THEMES.includes(localStorage.getItem("kvcar-theme")) ? localStorage.getItem("kvcar-theme") : "auto");
setInterval(frame, 1000);
poll();
