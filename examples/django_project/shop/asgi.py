"""The ASGI application: `uvicorn shop.asgi:application`."""

import os

from django.core.asgi import get_asgi_application

from responses_kit_django.asgi import ResponsesASGI

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "shop.settings")
application = ResponsesASGI(get_asgi_application())
