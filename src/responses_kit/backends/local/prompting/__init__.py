"""From a turn to a prompt: messages, chat templates and their sandbox."""
