"""The chat page. Its JavaScript is an ordinary client of the API."""

from django.contrib.auth.decorators import login_required
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render


@login_required
def chat(request: HttpRequest) -> HttpResponse:
    page = render(request, "orders/chat.html")
    page.headers["Content-Security-Policy"] = "default-src 'self'"
    return page
