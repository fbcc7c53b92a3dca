"""The URLs: the shop's pages, the admin, and the API under `/v1/`."""

from django.contrib import admin
from django.contrib.staticfiles.urls import staticfiles_urlpatterns
from django.urls import include, path

urlpatterns = [
    path("", include("orders.urls")),
    path("accounts/", include("django.contrib.auth.urls")),
    path("admin/", admin.site.urls),
    path("v1/", include("responses_kit_django.urls")),
    *staticfiles_urlpatterns(),  # with DEBUG only, for servers other than runserver
]
