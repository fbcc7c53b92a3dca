"""All figures: `python -m tests.benchmarks`. Takes some minutes; run it on an idle machine."""

from . import http, local

http.main()
local.main()
