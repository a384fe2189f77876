"""Where each fusion goes on the real model classes; ``runtime.mount`` puts it there."""
