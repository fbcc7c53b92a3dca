"""Authentication of programs by API keys. Users of the pages log in with sessions."""

from django.contrib.auth.models import User
from django.http import HttpRequest

from responses_kit_django.auth import bearer_token

from .models import ApiKey


def api_key(request: HttpRequest) -> User | None:
    """Return the user of the request's API key, or None. Listed in the setting `AUTH`."""
    key = bearer_token(request)
    if key is None:
        return None
    found = ApiKey.objects.select_related("user").filter(digest=ApiKey.digest_of(key), user__is_active=True).first()
    return found.user if found else None
