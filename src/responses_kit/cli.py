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
    sys.exit(f'The command line needs {missing.name}: pip install "responses-kit[serve]"')

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
models = typer.Typer(help="The models that are on this machine.", no_args_is_help=True)
app.add_typer(models, name="models")
store = typer.Typer(help="Where responses are kept.", no_args_is_help=True)
app.add_typer(store, name="store")

MODEL_HELP = '"smollm2", a .gguf file, or a hub name such as owner/repo:file.gguf'

STORE_HELP = "Such as sqlite:///responses.db, postgresql://user@host/database or redis://host:6379/0."

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
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and end.")
    ] = False,
) -> None:
    """The Open Responses API, served from this machine."""


@app.command()
def serve(
    model: Annotated[str, typer.Option(help=MODEL_HELP)] = "smollm2",
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on.")] = 8000,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            envvar="RESPONSES_KIT_API_KEY",
            help="Key that clients must send as a bearer token; may be given several times. "
            "Each key sees its own responses only.",
        ),
    ] = None,
    secret: Annotated[
        list[str] | None,
        typer.Option(
            envvar="RESPONSES_KIT_SECRET",
            help="Seals what clients carry, such as encrypted reasoning. The first one seals, all open. Without any, "
            "what was sealed cannot be opened after a restart.",
        ),
    ] = None,
    store: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            envvar="RESPONSES_KIT_STORE",
            help=f"Where responses are kept, in memory by default. {STORE_HELP} It is set up where it is not yet.",
        ),
    ] = None,
    resumable: Annotated[bool, typer.Option(help="Keep the events of foreground streams, too.")] = False,
    lmsp: Annotated[bool, typer.Option(help="Speak LMSP 1.0 (draft), too, under /lmsp/v1.")] = False,
    grace: Annotated[float, typer.Option(min=0, help="Seconds that answers have to end when the server stops.")] = 10,
    context_length: Annotated[int | None, typer.Option(min=16, help="Tokens that prompt and answer share.")] = None,
    gpu_layers: Annotated[int, typer.Option(min=0, help="Layers of the model to keep on the GPU.")] = 0,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads of each instance.")] = None,
    instances: Annotated[int, typer.Option(min=1, help="Answers that are generated at the same time.")] = 1,
    queue: Annotated[int, typer.Option(min=0, help="Requests that may wait for an instance.")] = 16,
) -> None:
    """Serves a local model under /v1, and with --lmsp under /lmsp/v1, until it is interrupted."""
    from .backends.local import LocalBackend

    listener = _listen(host, port)
    opened = None
    if store is not None:
        run_with_store(open_store(store), set_up_store)
        opened = open_store(store)
    keys = [key for key in api_key or [] if key]
    if host not in LOCALHOSTS and not keys:
        typer.secho(f"Anybody who reaches {host}:{port} may use the model. Set --api-key.", fg="yellow", err=True)
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
    served = _served(kit, lmsp, listener, grace, None if opened is None else opened.aclose)
    config = uvicorn.Config(
        served, timeout_graceful_shutdown=math.ceil(grace) + 5, ws_max_size=kit.settings.limits.max_body_bytes
    )
    with contextlib.suppress(KeyboardInterrupt):  # Ctrl-C is the usual end, and it has shut down in order
        uvicorn.Server(config).run(sockets=[listener])


@app.command()
def check(
    url: Annotated[str, typer.Argument(metavar="URL", help="The API's base, such as http://127.0.0.1:8000/v1.")],
    key: Annotated[
        str | None,
        typer.Option(envvar="RESPONSES_KIT_API_KEY", help="Sent as a bearer token; of several, the first one."),
    ] = None,
    model: Annotated[str | None, typer.Option(help="Which to ask; by default the first that the server lists.")] = None,
    header: Annotated[
        list[str] | None, typer.Option(metavar='"NAME: VALUE"', help="Sent as well; may be given several times.")
    ] = None,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds that each request may take.")] = 60,
) -> None:
    """Checks a running server from outside, as its clients see it. Ends with 1 if something is not as it should be."""
    from . import diagnostics

    first = next(iter((key or "").split()), None)  # the environment may have those of `serve`
    console = Console(highlight=False)

    def tell(finding: diagnostics.Finding) -> None:
        word, colour = diagnostics.VERDICTS[finding.ok]
        line = Text.assemble((f"{word:8}", colour), (f"{finding.name:16}", "bold"), finding.detail)
        console.print(line, soft_wrap=True)

    if anyio.run(partial(diagnostics.report, url, tell, headers=header or [], key=first, model=model, timeout=timeout)):
        raise typer.Exit(1)


@models.command("list")
def list_models() -> None:
    """Lists the models in this machine's cache."""
    from .backends.local import cache
    from .backends.local.download import catalog

    found = cache.listing()
    for file in found:
        typer.echo(f"{file.size / 1e6:9.1f} MB  {'ready  ' if file.converted else 'fetched'}  {file.path}")
    if not found:
        typer.echo(f"No models yet. `responses-kit models pull {catalog.SMOLLM2.name}` fetches the default.", err=True)


@models.command()
def pull(model: ModelArgument = "smollm2") -> None:
    """Fetches a model and makes it ready, so that serving it starts at once."""
    from .backends.local.model_files import prepare

    with _progress() as progress:
        prepared = prepare(model, progress=progress)
    typer.echo(prepared.path)


@models.command()
def convert(
    file: Annotated[Path, typer.Argument(help="A .gguf file of a llama model.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Where to write the converted file.")],
) -> None:
    """Converts a .gguf file to the form that the local engine loads."""
    from .backends.local.gguf.conversion import convert as convert_file
    from .backends.local.gguf.header import read_header
    from .backends.local.gguf.support import check

    with _progress() as progress:
        header = read_header(file)
        check(header, as_it_is=False)
        convert_file(header, output, progress)
    typer.echo(output)


@store.command()
def setup(url: StoreArgument) -> None:
    """Makes a store ready: creates what is missing, or brings it up to this version. Does no harm when repeated."""
    run_with_store(open_store(url), set_up_store)
    typer.echo("The store is ready.")


@store.command()
def prune(
    url: StoreArgument,
    max_records: Annotated[int | None, typer.Option(min=0, help="Most responses to keep; for SQL databases.")] = None,
) -> None:
    """Removes what has outlived its time, and ends responses whose worker is gone. To be run now and then."""
    if max_records is not None and url.startswith("redis"):
        raise ConfigurationError("Redis bounds itself, by its maxmemory; --max-records is for SQL databases.")
    settings = {} if max_records is None else {"max_records": max_records}
    removed, ended = run_with_store(open_store(url, **settings), lambda opened: Repository(opened).prune())
    typer.echo(f"{removed} responses removed, {ended} ended whose worker was gone.")


def api_key_owner(keys: Sequence[str]) -> Callable[[Request], str | None]:
    """An owner hook for bearer tokens: each key is an owner, and whoever has none is refused.

    Args:
        keys: The keys that count.
    """
    known = [(key.encode(), hashlib.sha256(key.encode()).hexdigest()) for key in keys]

    def owner(request: Request) -> str | None:
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            raise Unauthorized("Send the key as a header: Authorization: Bearer KEY.")
        found = None
        for key, digest in known:  # all of them, so that the time tells nothing
            if hmac.compare_digest(key, given.strip().encode()):
                found = digest
        return found

    return owner


def main() -> None:
    """Runs the command line; errors of ours end it with a sentence and no traceback."""
    try:
        app()
    except (ResponsesKitError, ImportError) as error:  # an ImportError says which extra is missing
        typer.secho(f"Error: {error}", fg="red", err=True)
        sys.exit(1)


def _listen(host: str, port: int) -> socket.socket:
    """Takes the port before the model is loaded, so that nobody waits for nothing."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        number = error.errno or 0  # those of name look-ups are negative
        reason = os.strerror(number) if number > 0 else "no such address"
        raise ConfigurationError(
            f"Cannot listen on {host}:{port}: {reason}. Choose another address with --host or --port."
        ) from None


def _served(
    kit: ResponsesKit, lmsp: bool, listener: socket.socket, grace: float, closing: Callable[[], Awaitable[None]] | None
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
                where = f"http://{f'[{host}]' if ':' in host else host}:{port}{prefix}/responses"
                typer.echo(f"{name} answers at {where}", err=True)
            yield
        if closing is not None:
            await closing()

    routes = [route for prefix, dialect in prefixes.items() for route in responses_routes(kit, prefix, dialect=dialect)]
    return Starlette(routes=routes, lifespan=lifespan)


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[str, int, int | None], None]]:
    """Shows what takes a while as bars on standard error."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    tasks: dict[str, TaskID] = {}
    with Progress(*columns, console=Console(stderr=True)) as bars:

        def show(stage: str, done: int, total: int | None) -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(stage, total=total)
            bars.update(tasks[stage], completed=done, total=total)

        yield show
