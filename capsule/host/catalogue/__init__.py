"""The error codes: their exit statuses, causes and fixes. ``docs/errors.md`` is made of them."""
