"""A backend of your own in ten lines: `uvicorn examples.parrot:app`."""

from starlette.applications import Starlette

from responses_kit import Backend, ResponsesKit, outputs
from responses_kit_starlette import ResponsesApp


class Parrot(Backend):
    models = ["parrot"]

    async def generate(self, turn):
        words = turn.text.split()
        for word in words:
            yield f"{word} "
        yield outputs.Usage(input_tokens=len(words), output_tokens=len(words))


app = Starlette()
app.mount("/v1", ResponsesApp(ResponsesKit(Parrot())))
