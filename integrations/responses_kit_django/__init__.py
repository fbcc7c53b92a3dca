"""The Open Responses API in a Django project, under ASGI and WSGI.

In `settings.py` and `urls.py`::

    INSTALLED_APPS += ["responses_kit_django"]
    RESPONSES_KIT = {"BACKEND": "path.to.Backend"}

    path("v1/", include("responses_kit_django.urls"))

For WebSockets, in `asgi.py`::

    application = ResponsesASGI(get_asgi_application())        # from responses_kit_django.asgi
"""

from __future__ import annotations

try:
    import django  # noqa: F401  # fails early, with a hint
except ModuleNotFoundError as error:
    raise ModuleNotFoundError('responses_kit_django needs Django: pip install "responses-kit[django]"') from error
