"""Responses in Django's admin: to be found, read and, by those who may, deleted. Nobody adds or changes one."""

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
from ._admin.items import counted, label
from ._admin.transcript import raw, turns
from .models import Response

if TYPE_CHECKING:
    _ModelAdmin = admin.ModelAdmin[Response]
    _Paginator = Paginator[Response]
else:  # which take no parameters
    _ModelAdmin = admin.ModelAdmin
    _Paginator = Paginator

__all__ = ["ResponseAdmin"]

_MOST_LISTED: Final = 10_000
"""Responses that the list counts and has pages for; filters lead to the others."""

_MODELS_OF: Final = 1_000
"""How many of the newest responses tell which models there are to filter by."""

_MOST_DELETED: Final = 500
"""Responses that go at once; a form has no more fields than some 1,000."""

_MOST_FOLLOWING: Final = 20

_STATUSES: Final = ("queued", "in_progress", "completed", "incomplete", "failed", "cancelled")


_LONG: Final = ("head", "names", "input", "response", "request")
"""Columns that may be long."""


class _Pages(_Paginator):
    """Pages of the first rows: nobody waits until all rows of a large table are counted."""

    more = False

    @cached_property
    def count(self) -> int:
        rows = cast("QuerySet[Response]", self.object_list)
        found = rows.order_by()[: _MOST_LISTED + 1].count()
        self.more = found > _MOST_LISTED
        return min(found, _MOST_LISTED)


class _List(ChangeList):
    """The list, with a line of what the user said in each row."""

    def get_results(self, request: HttpRequest) -> None:
        super().get_results(request)
        self.result_list = list(self.result_list[: self.list_per_page])
        found = queries.previews(self.root_queryset, self.result_list)
        for row in self.result_list:
            row.preview = found.get(row.pk, "")


class _ByStatus(admin.SimpleListFilter):
    title = _("status")
    parameter_name = "status"

    def lookups(self, request: HttpRequest, model_admin: Any) -> Iterable[tuple[str, str]]:
        return [(status, status) for status in _STATUSES]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Response]) -> QuerySet[Response]:
        return queryset.filter(status=self.value()) if self.value() in _STATUSES else queryset


class _ByModel(admin.SimpleListFilter):
    title = _("model")
    parameter_name = "model"

    def lookups(self, request: HttpRequest, model_admin: Any) -> Iterable[tuple[str, str]]:
        newest = model_admin.get_queryset(request).order_by("-created").values_list("model", flat=True)[:_MODELS_OF]
        return [(name, name) for name in sorted(set(newest))]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Response]) -> QuerySet[Response]:
        name = self.value()
        if name is None:
            return queryset
        if "\x00" in name:  # which some databases do not take
            raise IncorrectLookupParameters
        return queryset.filter(model=name)


@admin.register(Response)
class ResponseAdmin(_ModelAdmin):
    """The list of responses, and the conversation that each of them belongs to."""

    list_display = ("response_id", "preview", "status", "model", "name_of_owner", "created", "background", "tokens")
    list_filter = (_ByStatus, _ByModel, "background", "created")
    list_per_page = 50
    list_max_show_all = 50
    ordering = ("-created",)
    paginator = _Pages
    search_fields = ("response_id", "owner", "input", "response")
    search_help_text = format_lazy(
        _("An id or an owner; or else words of the newest {count} responses here. Quotes keep words together."),
        count=queries.MOST_SEARCHED,
    )
    show_facets = admin.ShowFacets.NEVER  # each would be counted
    show_full_result_count = False
    sortable_by = ("created",)  # the one order that has an index

    class Media:
        """What both pages look like."""

        css = {"all": ["responses_kit_django/admin.css"]}

    def has_add_permission(self, request: HttpRequest) -> bool:
        """Nobody has; not even who may do anything."""
        return False

    def has_change_permission(self, request: HttpRequest, obj: Response | None = None) -> bool:
        """Nobody has; not even who may do anything."""
        return False

    def get_queryset(self, request: HttpRequest) -> QuerySet[Response]:
        """The responses without what may be long. Narrow it, and whoever asks sees no others anywhere."""
        return super().get_queryset(request).defer(*_LONG)

    # The list.

    def lookup_allowed(self, lookup: str, value: Any, request: HttpRequest) -> bool:
        """Long texts are for the search alone, which has bounds; an address could ask for any pattern in them."""
        return lookup.partition("__")[0] not in _LONG and super().lookup_allowed(lookup, value, request)

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[ChangeList]:
        """A list whose rows have their previews."""
        return _List

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[Response], search_term: str
    ) -> tuple[QuerySet[Response], bool]:
        """An id or an owner finds what it names; anything else finds what has all its words."""
        return (queries.matching(queryset, search_term) if search_term.strip() else queryset), False

    @admin.display(description=_("the user's last words"))
    def preview(self, row: Response) -> str:
        """What the user said last."""
        return str(getattr(row, "preview", ""))

    @admin.display(description=_("owner"))
    def name_of_owner(self, row: Response) -> str:
        """The owner, as the kit knows it."""
        return label(unquote(row.owner))

    @admin.display(description=_("tokens"))
    def tokens(self, row: Response) -> str:
        """Tokens in and out."""
        if row.input_tokens is None or row.output_tokens is None:
            return ""
        return gettext("%(input)s in, %(output)s out") % {
            "input": counted(row.input_tokens),
            "output": counted(row.output_tokens),
        }

    # One response.

    def get_fieldsets(self, request: HttpRequest, obj: Response | None = None) -> Any:
        """None: there is no form."""
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
        """The conversation up to this response."""
        if obj is not None:
            context |= self._conversation(self.get_queryset(request), obj)
        return super().render_change_form(request, context, add=add, change=change, form_url=form_url, obj=obj)

    @staticmethod
    def _conversation(queryset: QuerySet[Response], response: Response) -> dict[str, Any]:
        before = queries.ancestry(queryset, response)
        excerpts = queries.excerpts(queryset, before.pks)
        following = queries.following(queryset, response, _MOST_FOLLOWING + 1)
        return {
            "turns": list(enumerate(turns(excerpts), before.earlier + 1)),
            "own": before.earlier + len(excerpts),
            "ancestry": before,
            "owner": label(unquote(response.owner)),
            "previous": excerpts[-2].row if len(excerpts) > 1 else None,
            "following": following[:_MOST_FOLLOWING],
            "more_following": len(following) > _MOST_FOLLOWING,
            "kept_until": _moment(response.conversation.expires),
            "stored": [
                shown
                for one in excerpts[-1:]
                for shown in (
                    (gettext("Input"), raw(one.input, one.input_size)),
                    (gettext("Response"), raw(one.response, one.response_size)),
                )
            ],
        }

    # Deletion.

    def get_deleted_objects(
        self, objs: QuerySet[Response] | Sequence[Response], request: HttpRequest
    ) -> tuple[list[Any], dict[str, int], set[str], list[str]]:
        """What goes with responses, by number and unread: their events may be many, and long."""
        found = list(objs[: _MOST_DELETED + 1])
        if len(found) > _MOST_DELETED:
            refused = gettext("more than %(count)s responses at once: filter them, or search")
            return [], {}, set(), [refused % {"count": _MOST_DELETED}]
        collector = Collector(using=router.db_for_write(Response))
        try:
            collector.collect(found)
        except (ProtectedError, RestrictedError) as error:  # of what a project refers to responses with
            held = error.protected_objects if isinstance(error, ProtectedError) else error.restricted_objects
            return [], {}, set(), [str(one) for one in held]
        counts = Counter({model: len(rows) for model, rows in collector.data.items()})
        for rows in collector.fast_deletes:
            counts[rows.model] += rows.count()
        lacking = {
            str(model._meta.verbose_name)
            for model in counts
            if self.admin_site.is_registered(model)
            and not self.admin_site.get_model_admin(model).has_delete_permission(request)
        }
        told = {str(model._meta.verbose_name_plural): count for model, count in counts.items() if count}
        return [str(one) for one in found], told, lacking, []


def _moment(seconds: float) -> datetime | None:
    try:
        return datetime.fromtimestamp(seconds, UTC)
    except (OverflowError, ValueError, OSError):  # of a time that never comes
        return None
