"""Run all benchmarks: `python -m tests.benchmarks`. This takes minutes and needs an idle machine."""

from . import http, local

http.main()
local.main()
