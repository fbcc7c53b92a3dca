"""The command line: `responses-kit serve`, `check`, `models list | pull | convert`, `store setup | prune`."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import math
import os
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import anyio

try:
    import typer
    import uvicorn
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
    from rich.text import Text
except ModuleNotFoundError as missing:
    sys.exit(
        f'The command line needs {missing.name}: pip install "responses-kit[serve]", or "responses-kit[cli]" without '
        "the local model."
    )

from . import __version__
from .engine.repository import Repository
from .errors import ConfigurationError, ResponsesKitError, Unauthorized
from .http.lmsp import LMSP
from .http.open_responses import OpenResponses
from .http.router import WireProtocol
from .kit import ResponsesKit
from .stores.maintenance import run_with_store, set_up_store
from .stores.opening import open_store

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request

__all__ = ["api_key_owner", "app", "main"]

LOCALHOSTS = ("127.0.0.1", "::1", "localhost")

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
models = typer.Typer(help="Manage the models on this machine.", no_args_is_help=True)
app.add_typer(models, name="models")
store = typer.Typer(help="Set up and prune a store.", no_args_is_help=True)
app.add_typer(store, name="store")

MODEL_HELP = '"smollm2", a .gguf file, or a hub name such as owner/repo:file.gguf'

STORE_HELP = "For example sqlite:///responses.db, postgresql://user@host/database or redis://host:6379/0."

StoreArgument = Annotated[
    str, typer.Argument(metavar="URL", envvar="RESPONSES_KIT_STORE", show_envvar=True, help=STORE_HELP)
]

ModelArgument = Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP)]


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Serve the Open Responses API from this machine."""


@app.command()
def serve(
    model: Annotated[str, typer.Option(help=MODEL_HELP)] = "smollm2",
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on.")] = 8000,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            envvar="RESPONSES_KIT_API_KEY",
            help="Key that clients must send as a bearer token. May be repeated. Each key has its own responses.",
        ),
    ] = None,
    secret: Annotated[
        list[str] | None,
        typer.Option(
            envvar="RESPONSES_KIT_SECRET",
            help="Encrypts payloads that clients carry, such as reasoning. May be repeated: the first one encrypts, "
            "all decrypt. Without a secret, payloads are lost at a restart.",
        ),
    ] = None,
    store: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            envvar="RESPONSES_KIT_STORE",
            help=f"Store of the responses; by default this process's memory. {STORE_HELP} Set up if necessary.",
        ),
    ] = None,
    resumable: Annotated[bool, typer.Option(help="Log foreground streams too, so that they can be resumed.")] = False,
    lmsp: Annotated[bool, typer.Option(help="Also serve LMSP 1.0 (draft) under /lmsp/v1.")] = False,
    grace: Annotated[float, typer.Option(min=0, help="Seconds that responses may continue at shutdown.")] = 10,
    context_length: Annotated[int | None, typer.Option(min=16, help="Tokens that prompt and output share.")] = None,
    gpu_layers: Annotated[int, typer.Option(min=0, help="Number of the model's layers that run on the GPU.")] = 0,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads of each instance.")] = None,
    instances: Annotated[int, typer.Option(min=1, help="Responses that are generated at the same time.")] = 1,
    queue: Annotated[int, typer.Option(min=0, help="Requests that may wait for an instance.")] = 16,
) -> None:
    """Serve a local model under /v1, and with --lmsp under /lmsp/v1, until interrupted."""
    from .backends.local import LocalBackend

    listener = _listen(host, port)
    opened = None
    if store is not None:
        run_with_store(open_store(store), set_up_store)
        opened = open_store(store)
    keys = [key for key in api_key or [] if key]
    if host not in LOCALHOSTS and not keys:
        typer.secho(f"Any client that can reach {host}:{port} may use the model. Set --api-key.", fg="yellow", err=True)
    with _progress() as progress:
        backend = LocalBackend(
            model,
            context_length=context_length,
            gpu_layers=gpu_layers,
            threads=threads,
            instances=instances,
            queue=queue,
            progress=progress,
        )
    kit = ResponsesKit(
        backend,
        store=opened,
        owner=api_key_owner(keys) if keys else None,
        secrets=secret or [],
        resumable=resumable,
    )
    served = _make_app(kit, lmsp, listener, grace, None if opened is None else opened.aclose)
    config = uvicorn.Config(
        served, timeout_graceful_shutdown=math.ceil(grace) + 5, ws_max_size=kit.settings.limits.max_body_bytes
    )
    with contextlib.suppress(KeyboardInterrupt):  # Ctrl-C; the server has already shut down in order
        uvicorn.Server(config).run(sockets=[listener])


@app.command()
def check(
    url: Annotated[str, typer.Argument(metavar="URL", help="Base URL of the API, such as http://127.0.0.1:8000/v1.")],
    key: Annotated[
        str | None,
        typer.Option(
            envvar="RESPONSES_KIT_API_KEY", help="Key to send as a bearer token; the first one if there are several."
        ),
    ] = None,
    model: Annotated[str | None, typer.Option(help="Model to ask; by default the first that the server lists.")] = None,
    header: Annotated[
        list[str] | None, typer.Option(metavar='"NAME: VALUE"', help="Additional header. May be repeated.")
    ] = None,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds that each request may take.")] = 60,
) -> None:
    """Check a running server from outside, as its clients see it. Exit with status 1 if a check fails."""
    from . import diagnostics

    first = next(iter((key or "").split()), None)  # the variable may hold several keys for `serve`
    console = Console(highlight=False)

    def show(finding: diagnostics.Finding) -> None:
        word, colour = diagnostics.VERDICTS[finding.ok]
        line = Text.assemble((f"{word:8}", colour), (f"{finding.name:16}", "bold"), finding.detail)
        console.print(line, soft_wrap=True)

    if anyio.run(partial(diagnostics.report, url, show, headers=header or [], key=first, model=model, timeout=timeout)):
        raise typer.Exit(1)


@models.command("list")
def list_models() -> None:
    """List the models in this machine's cache."""
    from .backends.local import cache
    from .backends.local.download import catalog

    found = cache.list_files()
    for file in found:
        typer.echo(f"{file.size / 1e6:9.1f} MB  {'ready  ' if file.is_converted else 'fetched'}  {file.path}")
    if not found:
        typer.echo(f"No models yet. `responses-kit models pull {catalog.SMOLLM2.name}` fetches the default.", err=True)


@models.command()
def pull(model: ModelArgument = "smollm2") -> None:
    """Fetch and prepare a model, so that serving it starts immediately."""
    from .backends.local.model_files import prepare

    with _progress() as progress:
        prepared = prepare(model, progress=progress)
    typer.echo(prepared.path)


@models.command()
def convert(
    file: Annotated[Path, typer.Argument(help="A .gguf file of a llama model.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Path of the converted file.")],
) -> None:
    """Convert a .gguf file to the format that the local engine loads."""
    from .backends.local.gguf.conversion import convert as convert_file
    from .backends.local.gguf.header import read_header
    from .backends.local.gguf.support import check_supported

    with _progress() as progress:
        header = read_header(file)
        check_supported(header, is_final=False)
        convert_file(header, output, progress)
    typer.echo(output)


@store.command()
def setup(url: StoreArgument) -> None:
    """Set up a store: create or migrate its tables. Idempotent."""
    run_with_store(open_store(url), set_up_store)
    typer.echo("The store is ready.")


@store.command()
def prune(
    url: StoreArgument,
    max_records: Annotated[
        int | None, typer.Option(min=0, help="Number of responses that remain; for SQL databases.")
    ] = None,
) -> None:
    """Delete expired responses and end orphaned ones. Run it regularly."""
    if max_records is not None and url.startswith("redis"):
        raise ConfigurationError("--max-records is for SQL databases; Redis is limited by its own maxmemory setting.")
    settings = {} if max_records is None else {"max_records": max_records}
    deleted, ended = run_with_store(open_store(url, **settings), lambda opened: Repository(opened).prune())
    typer.echo(f"Deleted {deleted} responses, ended {ended} orphaned responses.")


def api_key_owner(keys: Sequence[str]) -> Callable[[Request], str | None]:
    """Return an owner hook for bearer tokens; each key is one owner.

    Args:
        keys: The valid keys.
    """
    digests = [(key.encode(), hashlib.sha256(key.encode()).hexdigest()) for key in keys]

    def owner(request: Request) -> str | None:
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            raise Unauthorized("Send the key as a header: Authorization: Bearer KEY.")
        found = None
        for key, digest in digests:  # all of them, so that the duration discloses nothing
            if hmac.compare_digest(key, given.strip().encode()):
                found = digest
        return found

    return owner


def main() -> None:
    """Run the command line; print the kit's own errors without a traceback."""
    try:
        app()
    except (ResponsesKitError, ImportError) as error:  # an ImportError names the missing extra
        typer.secho(f"Error: {error}", fg="red", err=True)
        sys.exit(1)


def _listen(host: str, port: int) -> socket.socket:
    """Bind the port before the model is loaded, so that a taken port fails immediately."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        number = error.errno or 0  # errors of name resolution are negative
        reason = os.strerror(number) if number > 0 else "no such address"
        raise ConfigurationError(
            f"Cannot listen on {host}:{port}: {reason}. Choose another address with --host or --port."
        ) from None


def _make_app(
    kit: ResponsesKit,
    lmsp: bool,
    listener: socket.socket,
    grace: float,
    close_store: Callable[[], Awaitable[None]] | None,
) -> Starlette:
    try:
        from starlette.applications import Starlette

        from responses_kit_starlette import responses_routes
    except ModuleNotFoundError as missing:
        raise ConfigurationError('Serving needs Starlette: pip install "responses-kit[starlette]"') from missing

    prefixes: dict[str, type[WireProtocol]] = {"/v1": OpenResponses} | ({"/lmsp/v1": LMSP} if lmsp else {})

    @contextlib.asynccontextmanager
    async def lifespan(_: Any) -> AsyncIterator[None]:
        host, port = listener.getsockname()[:2]
        name = kit.models()["data"][0]["id"]
        async with kit.lifespan(grace=grace):
            for prefix in prefixes:
                address = f"http://{f'[{host}]' if ':' in host else host}:{port}{prefix}/responses"
                typer.echo(f"{name} answers at {address}", err=True)
            yield
        if close_store is not None:
            await close_store()

    routes = [route for prefix, dialect in prefixes.items() for route in responses_routes(kit, prefix, dialect=dialect)]
    return Starlette(routes=routes, lifespan=lifespan)


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[str, int, int | None], None]]:
    """Show progress bars on standard error."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    tasks: dict[str, TaskID] = {}
    with Progress(*columns, console=Console(stderr=True)) as bars:

        def show(stage: str, done: int, total: int | None) -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(stage, total=total)
            bars.update(tasks[stage], completed=done, total=total)

        yield show
