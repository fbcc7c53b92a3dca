"""The wire's models: one module a noun, written from the specification of 2026-04-24."""
