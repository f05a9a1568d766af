// Elements from data. Text goes in as text nodes only: nothing that a peer chose is ever parsed as markup.

const SVG = "http://www.w3.org/2000/svg";

/** Sets properties: class, on* handlers, the rest as attributes; null and false leave one out. */
function dress(node, props) {
  for (const [name, value] of Object.entries(props ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : String(value));
  }
}

export function el(tag, props, ...children) {
  const node = document.createElement(tag);
  dress(node, props);
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

export function svg(tag, props, ...children) {
  const node = document.createElementNS(SVG, tag);
  dress(node, props);
  node.append(...children);
  return node;
}

export const byId = (id) => document.getElementById(id);

/** Writes only what differs, so that selections, focus and screen readers are left alone. */
export function setText(node, text) {
  text = String(text);
  if (node.textContent !== text) node.textContent = text;
}

export function setClass(node, text) {
  if (node.getAttribute("class") !== text) node.setAttribute("class", text);
}

export function setAttr(node, name, value) {
  if (node.getAttribute(name) !== String(value)) node.setAttribute(name, value);
}

/** Keyed children: one node an item, made once, updated after; `node.item` is what it shows. */
export function reconcile(parent, items, key, create, update) {
  const known = parent.keyed ?? (parent.keyed = new Map());
  const wanted = new Set(items.map(key));
  for (const [name, node] of known) {
    if (!wanted.has(name)) {
      node.remove();
      node.detail?.remove();
      known.delete(name);
    }
  }
  let place = parent.firstChild;
  for (const item of items) {
    const name = key(item);
    let node = known.get(name);
    if (!node) {
      node = create(item);
      known.set(name, node);
    }
    node.item = item;
    update(node, item);
    for (const one of node.detail ? [node, node.detail] : [node]) {
      if (one === place) place = place.nextSibling;
      else parent.insertBefore(one, place);
    }
  }
}

const whole = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });
const short = new Intl.NumberFormat("en-US", { notation: "compact", maximumFractionDigits: 1 });

export const count = (value) => (value === null || value === undefined ? "–" : whole.format(value));
export const compact = (value) => (value < 10000 ? whole.format(value) : short.format(value));
export const percent = (value) => (value === null || value === undefined ? "–" : `${(100 * value).toFixed(value < 0.9995 && value > 0 ? 1 : 0)}%`);
export const number = (value) => (value === null || value === undefined ? "–" : Number.isInteger(value) ? whole.format(value) : value.toFixed(1));
export const plural = (n, word) => `${count(n)} ${word}${n === 1 ? "" : "s"}`;

export function cost(parts) {
  return parts.map((part) => (Number.isInteger(part) ? String(part) : Math.abs(part) >= 1000 ? part.toFixed(0) : part.toFixed(4).replace(/0+$/, "").replace(/\.$/, ""))).join(", ");
}

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  if (seconds < 120) return `${Math.round(seconds)} s`;
  if (seconds < 7200) return `${Math.round(seconds / 60)} min`;
  return seconds < 172800 ? `${Math.round(seconds / 3600)} h` : `${Math.round(seconds / 86400)} d`;
}

export const clock = (epoch) => new Date(epoch * 1000).toLocaleTimeString("en-GB");
