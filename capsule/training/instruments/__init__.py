"""The instruments of ``capsule diagnose``, and dense records."""
