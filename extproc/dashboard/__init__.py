"""The page of the admin port: what runs, how well it hits, why it chose, what to do. docs/dashboard.md shows it.

static/         index.html, style.css, modules of app.js: plain files, no build step, nothing from elsewhere
pages.py        the routes, and the headers that let the page load nothing but itself
overview.py     GET /v1/internal/overview: everything the page shows, polled each two seconds
history.py      the last quarter of an hour, so that a page opened now has a past
explain.py      POST /v1/internal/explain: tokens, blocks, holders and every scorer's choice for one request
remedies.py     what is wrong with a stream or a request -> what to do, as tables
"""

from extproc.dashboard.pages import Dashboard

__all__ = ["Dashboard"]
