// Asking kvcar. The token, where one is needed, lives in this tab's session storage only.

const KEY = "kvcar-token";

export class Unauthorized extends Error {}

export const setToken = (token) => sessionStorage.setItem(KEY, token);
export const forgetToken = () => sessionStorage.removeItem(KEY);
export const hasToken = () => Boolean(sessionStorage.getItem(KEY));

/** JSON of a path. Throws Unauthorized for 401, Error with kvcar's own words for others, TypeError when unreachable. */
export async function ask(path, { body, timeout = 10000 } = {}) {
  const headers = {};
  const token = sessionStorage.getItem(KEY);
  if (token) headers["X-Internal-Token"] = String.fromCharCode(...new TextEncoder().encode(token)); // UTF-8, byte by byte
  if (body !== undefined) headers["Content-Type"] = "application/json";
  const answer = await fetch(path, {
    method: body === undefined ? "GET" : "POST",
    headers,
    body,
    cache: "no-store",
    signal: AbortSignal.timeout(timeout),
  });
  if (answer.status === 401) throw new Unauthorized();
  const found = await answer.json();
  if (!answer.ok) {
    const error = new Error(found.error ?? `HTTP ${answer.status}`);
    error.status = answer.status;
    error.found = found;
    throw error;
  }
  return found;
}
