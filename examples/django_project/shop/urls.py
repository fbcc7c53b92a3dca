"""The shop's addresses: its pages, its admin, and the API under `/v1/`."""

from django.contrib import admin
from django.contrib.staticfiles.urls import staticfiles_urlpatterns
from django.urls import include, path

urlpatterns = [
    path("", include("orders.urls")),
    path("accounts/", include("django.contrib.auth.urls")),
    path("admin/", admin.site.urls),
    path("v1/", include("responses_kit_django.urls")),
    *staticfiles_urlpatterns(),  # under DEBUG alone; other servers than runserver do not do it by themselves
]
