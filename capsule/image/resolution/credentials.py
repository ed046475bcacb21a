"""Credentials in a source tree, which every bundle of it would publish.

They are recognised by the usual names of files that hold them, and by the forms of tokens that
their issuers gave a fixed prefix so that scanners can find them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import PurePosixPath

from capsule.experiment.patterns import chosen

# Matched against the last part of a path, and against its last two.
_NAMES = (
    *(".env", ".env.*", "!.env.example", "!.env.sample", "!.env.template"),
    *(".netrc", "_netrc", ".npmrc", ".pypirc", ".pgpass", ".my.cnf", ".s3cfg", ".boto"),
    *(".git-credentials", ".dockercfg", ".htpasswd", ".vault-token", ".terraformrc"),
    *("id_rsa", "id_dsa", "id_ecdsa", "id_ecdsa_sk", "id_ed25519", "id_ed25519_sk"),
    *("*.p12", "*.pfx", "*.jks", "*.keystore", "*.kdbx", "*.tfstate"),
    *("*aws_credentials", "credentials.json", "client_secret*.json", "service-account*.json"),
    *("service_account*.json", "secrets.json", "secrets.toml", "secrets.yaml", "secrets.yml"),
    *("kubeconfig", "kaggle.json"),
    *(".aws/credentials", ".azure/*", ".config/gcloud*", ".docker/config.json", ".kube/config"),
    *(".ssh/*", "!.ssh/*.pub", "!.ssh/known_hosts", ".huggingface/token", "huggingface/token"),
)
_TOKENS = (  # what it is, how it begins, and its form
    ("a private key", b"-----BEGIN ", rb"-----BEGIN [A-Z0-9 ]*PRIVATE KEY"),
    ("an AWS access key", b"AKIA", rb"\bAKIA[0-9A-Z]{16}\b"),
    ("an AWS access key", b"ASIA", rb"\bASIA[0-9A-Z]{16}\b"),
    ("a GitHub token", b"gh", rb"\bgh[pousr]_[A-Za-z0-9]{36}"),
    ("a GitHub token", b"github_pat_", rb"\bgithub_pat_[A-Za-z0-9_]{60}"),
    ("a GitLab token", b"glpat-", rb"\bglpat-[A-Za-z0-9_-]{20}"),
    ("a Google API key", b"AIza", rb"\bAIza[A-Za-z0-9_-]{35}"),
    ("a Hugging Face token", b"hf_", rb"\bhf_[A-Za-z0-9]{34}"),
    ("an npm token", b"npm_", rb"\bnpm_[A-Za-z0-9]{36}"),
    ("an OpenAI or Anthropic key", b"sk-", rb"\bsk-(proj-|svcacct-|ant-)[A-Za-z0-9_-]{32}"),
    ("an OpenAI key", b"T3BlbkFJ", rb"\bsk-[A-Za-z0-9]{20}T3BlbkFJ"),
    ("a PyPI token", b"pypi-AgE", rb"\bpypi-AgE[A-Za-z0-9_-]{50}"),
    ("a Slack token", b"xox", rb"\bxox[abeprs]-[0-9]{8,}-[A-Za-z0-9-]{8}"),
    ("a Stripe key", b"_live_", rb"\b[rs]k_live_[A-Za-z0-9]{24}"),
)
_FORMS = tuple((kind, prefix, re.compile(form)) for kind, prefix, form in _TOKENS)
_OVERLAP = 256  # bytes: more than the longest form needs


def is_credential_name(path: str) -> bool:
    """Tell whether a file of this relative path usually holds credentials."""
    parts = PurePosixPath(path).parts
    return chosen(parts[-1], _NAMES) or chosen("/".join(parts[-2:]), _NAMES)


def find_credential(chunks: Iterable[bytes]) -> str | None:
    """Return what kind of credential is in consecutive chunks; None if none is recognised."""
    tail = b""
    for chunk in chunks:
        window = tail + chunk
        for kind, prefix, form in _FORMS:
            # Looking for a few bytes is cheap, so the expression is left to what has its prefix.
            if prefix in window and form.search(window):
                return kind
        tail = window[-_OVERLAP:]
    return None
