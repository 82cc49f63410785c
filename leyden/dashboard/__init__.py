"""The dashboard: every recorded run as pages in a browser, from files or from a store.

`source.py` finds the runs, `views.py` reads one view as JSON, `app.py` serves views, pages and events over HTTP, and
`static/` holds the pages: ES modules and one style sheet, without a build step. A view is one function and one line in
`VIEWS`; its page is one module and one line in `static/main.js`. Only
`review.py` writes: the answers of reviewers, as feedback.
"""

from leyden.dashboard.app import DashboardApp as DashboardApp
from leyden.dashboard.source import Source as Source
