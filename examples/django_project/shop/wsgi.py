"""The WSGI application: `gunicorn shop.wsgi -k gthread --threads 32`. Each stream occupies a thread."""

import os

from django.core.wsgi import get_wsgi_application

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "shop.settings")
application = get_wsgi_application()
