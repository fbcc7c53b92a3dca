"""An MCP server with one tool, which `examples/agent.py` starts."""

from datetime import UTC, datetime, timedelta

from mcp.server import MCPServer

server = MCPServer("clock")


@server.tool()
def delivery_date(days: int) -> str:
    """Return the arrival date of a delivery that takes this many days."""
    return f"It arrives on {datetime.now(UTC) + timedelta(days=max(0, min(days, 365))):%Y-%m-%d}."


if __name__ == "__main__":
    server.run()
