"""The admin of responses: search, transcripts and deletion. Responses cannot be added or changed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, cast
from urllib.parse import unquote

from django.contrib import admin
from django.contrib.admin.options import IncorrectLookupParameters
from django.contrib.admin.views.main import ChangeList
from django.core.paginator import Paginator
from django.db import router
from django.db.models import ProtectedError, QuerySet, RestrictedError
from django.db.models.deletion import Collector
from django.http import HttpRequest, HttpResponse
from django.utils.functional import cached_property
from django.utils.text import format_lazy
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from ._admin import queries
from ._admin.items import format_count, shorten
from ._admin.transcript import build_turns, format_stored
from .models import Response

if TYPE_CHECKING:
    _ModelAdmin = admin.ModelAdmin[Response]
    _Paginator = Paginator[Response]
else:  # generic in the type stubs only
    _ModelAdmin = admin.ModelAdmin
    _Paginator = Paginator

__all__ = ["ResponseAdmin"]

_MAX_LISTED: Final = 10_000
"""Responses that the list counts and pages through. Filters are needed to reach further ones."""

_MAX_ROWS_FOR_MODELS: Final = 1_000
"""Newest responses from which the filter takes its choices of models."""

_MAX_DELETED: Final = 500
"""Responses that one action deletes, below Django's limit on form fields (DATA_UPLOAD_MAX_NUMBER_FIELDS, 1000)."""

_MAX_CONTINUATIONS: Final = 20
"""Links to continuations on a response's page."""

_STATUSES: Final = ("queued", "in_progress", "completed", "incomplete", "failed", "cancelled")

_LONG_COLUMNS: Final = ("head", "names", "input", "response", "request")
"""Columns that the list does not load, and lookups cannot filter by."""


class _CappedPaginator(_Paginator):
    """A paginator that stops counting at a maximum, because counting a large table is slow."""

    more = False

    @cached_property
    def count(self) -> int:
        rows = cast("QuerySet[Response]", self.object_list)
        count = rows.order_by()[: _MAX_LISTED + 1].count()
        self.more = count > _MAX_LISTED
        return min(count, _MAX_LISTED)


class _ResponseChangeList(ChangeList):
    """The list of responses, with a preview of the user's last message in each row."""

    def get_results(self, request: HttpRequest) -> None:
        super().get_results(request)
        self.result_list = list(self.result_list[: self.list_per_page])
        previews = queries.load_previews(self.root_queryset, self.result_list)
        for row in self.result_list:
            row.preview = previews.get(row.pk, "")


class _StatusFilter(admin.SimpleListFilter):
    title = _("status")
    parameter_name = "status"

    def lookups(self, request: HttpRequest, model_admin: Any) -> Iterable[tuple[str, str]]:
        return [(status, status) for status in _STATUSES]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Response]) -> QuerySet[Response]:
        return queryset.filter(status=self.value()) if self.value() in _STATUSES else queryset


class _ModelFilter(admin.SimpleListFilter):
    title = _("model")
    parameter_name = "model"

    def lookups(self, request: HttpRequest, model_admin: Any) -> Iterable[tuple[str, str]]:
        newest = (
            model_admin.get_queryset(request)
            .order_by("-created")
            .values_list("model", flat=True)[:_MAX_ROWS_FOR_MODELS]
        )
        return [(name, name) for name in sorted(set(newest))]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Response]) -> QuerySet[Response]:
        name = self.value()
        if name is None:
            return queryset
        if "\x00" in name:  # PostgreSQL refuses null characters
            raise IncorrectLookupParameters
        return queryset.filter(model=name)


@admin.register(Response)
class ResponseAdmin(_ModelAdmin):
    """The list of responses, and for each response the transcript of its conversation."""

    list_display = ("response_id", "preview", "status", "model", "name_of_owner", "created", "background", "tokens")
    list_filter = (_StatusFilter, _ModelFilter, "background", "created")
    list_per_page = 50
    list_max_show_all = 50
    ordering = ("-created",)
    paginator = _CappedPaginator
    search_fields = ("response_id", "owner", "input", "response")
    search_help_text = format_lazy(
        _('Enter an id or an owner, or words in the newest {count} responses. Put phrases in quotes: "to be found".'),
        count=queries.MAX_SEARCHED_RESPONSES,
    )
    show_facets = admin.ShowFacets.NEVER  # facets count all rows
    show_full_result_count = False
    sortable_by = ("created",)  # the only column with an index for sorting

    class Media:
        """The style sheet of both pages."""

        css = {"all": ["responses_kit_django/admin.css"]}

    def has_add_permission(self, request: HttpRequest) -> bool:
        """Return False, for superusers, too."""
        return False

    def has_change_permission(self, request: HttpRequest, obj: Response | None = None) -> bool:
        """Return False, for superusers, too."""
        return False

    def get_queryset(self, request: HttpRequest) -> QuerySet[Response]:
        """Return the responses without their long columns. Override it to restrict all pages to some responses."""
        return super().get_queryset(request).defer(*_LONG_COLUMNS)

    # The list.

    def lookup_allowed(self, lookup: str, value: Any, request: HttpRequest) -> bool:
        """Refuse lookups on long columns, because their cost is unbounded. The search has bounds."""
        return lookup.partition("__")[0] not in _LONG_COLUMNS and super().lookup_allowed(lookup, value, request)

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[ChangeList]:
        """Return the list class that adds previews."""
        return _ResponseChangeList

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[Response], search_term: str
    ) -> tuple[QuerySet[Response], bool]:
        """Return the responses with an id or owner, or else those that contain all words of the search."""
        return (queries.search(queryset, search_term) if search_term.strip() else queryset), False

    @admin.display(description=_("last user message"))
    def preview(self, row: Response) -> str:
        """Return the beginning of the user's last message."""
        return str(getattr(row, "preview", ""))

    @admin.display(description=_("owner"))
    def name_of_owner(self, row: Response) -> str:
        """Return the owner as the kit knows it, without the encoding of the column."""
        return shorten(unquote(row.owner))

    @admin.display(description=_("tokens"))
    def tokens(self, row: Response) -> str:
        """Return the numbers of input and output tokens."""
        if row.input_tokens is None or row.output_tokens is None:
            return ""
        return gettext("%(input)s in, %(output)s out") % {
            "input": format_count(row.input_tokens),
            "output": format_count(row.output_tokens),
        }

    # One response.

    def get_fieldsets(self, request: HttpRequest, obj: Response | None = None) -> Any:
        """Return no fieldsets, because the page has no form."""
        return []

    def render_change_form(
        self,
        request: HttpRequest,
        context: dict[str, Any],
        add: bool = False,
        change: bool = False,
        form_url: str = "",
        obj: Response | None = None,
    ) -> HttpResponse:
        """Render the transcript of the conversation up to this response."""
        if obj is not None:
            context |= self._transcript(self.get_queryset(request), obj)
        return super().render_change_form(request, context, add=add, change=change, form_url=form_url, obj=obj)

    @staticmethod
    def _transcript(queryset: QuerySet[Response], response: Response) -> dict[str, Any]:
        ancestry = queries.load_ancestry(queryset, response)
        excerpts = queries.load_excerpts(queryset, ancestry.pks)
        continuations = queries.load_continuations(queryset, response, _MAX_CONTINUATIONS + 1)
        return {
            "turns": list(enumerate(build_turns(excerpts), ancestry.earlier + 1)),
            "own": ancestry.earlier + len(excerpts),
            "ancestry": ancestry,
            "owner": shorten(unquote(response.owner)),
            "previous": excerpts[-2].row if len(excerpts) > 1 else None,
            "continuations": continuations[:_MAX_CONTINUATIONS],
            "has_more_continuations": len(continuations) > _MAX_CONTINUATIONS,
            "expires": _to_datetime(response.conversation.expires),
            "stored": [
                titled
                for excerpt in excerpts[-1:]
                for titled in (
                    (gettext("Input"), format_stored(excerpt.input, excerpt.input_size)),
                    (gettext("Response"), format_stored(excerpt.response, excerpt.response_size)),
                )
            ],
        }

    # Deletion.

    def get_deleted_objects(
        self, objs: QuerySet[Response] | Sequence[Response], request: HttpRequest
    ) -> tuple[list[Any], dict[str, int], set[str], list[str]]:
        """Return what a deletion includes. Related rows are counted and not loaded, because events can be long."""
        responses = list(objs[: _MAX_DELETED + 1])
        if len(responses) > _MAX_DELETED:
            message = gettext("more than %(count)s responses at a time; select fewer")
            return [], {}, set(), [message % {"count": _MAX_DELETED}]
        collector = Collector(using=router.db_for_write(Response))
        try:
            collector.collect(responses)
        except (ProtectedError, RestrictedError) as error:  # raised by foreign keys of the project's own models
            protected = error.protected_objects if isinstance(error, ProtectedError) else error.restricted_objects
            return [], {}, set(), [str(one) for one in protected]
        counts = Counter({model: len(rows) for model, rows in collector.data.items()})
        for rows in collector.fast_deletes:
            counts[rows.model] += rows.count()
        forbidden = {
            str(model._meta.verbose_name)
            for model in counts
            if self.admin_site.is_registered(model)
            and not self.admin_site.get_model_admin(model).has_delete_permission(request)
        }
        counts_by_name = {str(model._meta.verbose_name_plural): count for model, count in counts.items() if count}
        return [str(one) for one in responses], counts_by_name, forbidden, []


def _to_datetime(seconds: float) -> datetime | None:
    try:
        return datetime.fromtimestamp(seconds, UTC)
    except (OverflowError, ValueError, OSError):  # beyond the year 9999, such as with an infinite ttl
        return None
