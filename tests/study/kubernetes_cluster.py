"""A Kubernetes cluster of this machine alone: the parts of its API that a real kubectl uses.

Jobs are checked by the published schema. Their pods are processes of this machine, without
containers. Each request first brings the cluster up to date: it looks which processes have ended,
and starts a pod for every index that needs one.
"""

import itertools
import json
import signal
import subprocess
import threading
from collections import Counter
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import kubernetes_validate

INDEX = "batch.kubernetes.io/job-completion-index"
JOB = "batch.kubernetes.io/job-name"
DISRUPTION = {"type": "DisruptionTarget", "status": "True"}
ALIVE = ("Pending", "Running")
PATIENCE = 600.0
RESOURCES = {
    "/api/v1": [("pods", "Pod"), ("events", "Event")],
    "/apis/batch/v1": [("jobs", "Job")],
}
DISCOVERY = {
    "/api": {"kind": "APIVersions", "versions": ["v1"]},
    "/apis": {
        "kind": "APIGroupList",
        "apiVersion": "v1",
        "groups": [
            {
                "name": "batch",
                "versions": [{"groupVersion": "batch/v1", "version": "v1"}],
                "preferredVersion": {"groupVersion": "batch/v1", "version": "v1"},
            }
        ],
    },
    # Servers check the fields of manifests: kubectl reads it off the parameters of PATCH.
    "/openapi/v3": {"paths": {"apis/batch/v1": {"serverRelativeURL": "/openapi/v3/apis/batch/v1"}}},
    "/openapi/v3/apis/batch/v1": {
        "openapi": "3.0.0",
        "paths": {
            "/apis/batch/v1/namespaces/{namespace}/jobs": {
                "patch": {
                    "parameters": [{"name": "fieldValidation", "in": "query"}],
                    "x-kubernetes-group-version-kind": {
                        "group": "batch",
                        "version": "v1",
                        "kind": "Job",
                    },
                }
            }
        },
    },
    **{
        path: {
            "kind": "APIResourceList",
            "apiVersion": "v1",
            "groupVersion": path.removeprefix("/apis/").removeprefix("/api/"),
            "resources": [
                {
                    "name": name,
                    "singularName": kind.lower(),
                    "namespaced": True,
                    "kind": kind,
                    "verbs": ["create", "delete", "get", "list"],
                }
                for name, kind in resources
            ],
        }
        for path, resources in RESOURCES.items()
    },
}


class Cluster:
    """What the API serves.

    Attributes:
        jobs: The Jobs by their names; a test may change them.
        pods: The pods by their names.
        pending: What the status of the pod of an index adds while it cannot start.
        refusal: Why no pod is created, as an event has it; or "events", which cannot be listed.
        most: The most pods of one index that ever were alive at the same time.
        version: The version of Kubernetes whose schema has the last word.
    """

    def __init__(self, path: str) -> None:
        self.jobs, self.pods, self.pending = {}, {}, {}
        self.most, self.version, self.refusal = 0, "1.37", None
        self.guard = threading.RLock()
        self._processes, self._path, self._numbers = {}, path, itertools.count(1)

    def answer(self, method, url, body):
        """Return the status and the document that answer a request."""
        parts = urlsplit(url)
        with self.guard:
            if parts.path in DISCOVERY:
                return 200, DISCOVERY[parts.path]
            self._bring_up_to_date()
            query = {name: values[0] for name, values in parse_qs(parts.query).items()}
            match [method, *parts.path.strip("/").split("/")]:
                case ["POST", "apis", "batch", "v1", "namespaces", namespace, "jobs"]:
                    return self._create(json.loads(body), namespace)
                case ["GET", "apis", "batch", "v1", "namespaces", _, "jobs", name] if (
                    name in self.jobs
                ):
                    return 200, self.jobs[name]
                case ["DELETE", "apis", "batch", "v1", "namespaces", _, "jobs", name] if (
                    name in self.jobs
                ):
                    self._delete(name)
                    return 200, {"kind": "Status", "apiVersion": "v1", "status": "Success"}
                case ["GET", "api", "v1", "namespaces", _, "pods"]:
                    return 200, self._pods(**query)
                case ["GET", "api", "v1", "namespaces", _, "events"]:
                    return self._events()
            return _failed(404, "NotFound", f"{method} {parts.path} not found")

    def _create(self, job, namespace):
        try:
            kubernetes_validate.validate(job, self.version, strict=True)
        except kubernetes_validate.ValidationError as error:
            return _failed(422, "Invalid", f"Job is invalid: {error.json_path}: {error.message}")
        job["metadata"] |= {"namespace": namespace, "uid": job["metadata"]["name"]}
        self.jobs[job["metadata"]["name"]] = job | {"status": {}}
        self._bring_up_to_date()
        return 201, job

    def _delete(self, job):
        del self.jobs[job]
        for name, pod in [*self.pods.items()]:
            if pod["metadata"]["labels"][JOB] == job:
                if name in self._processes:
                    self._stop(name)
                del self.pods[name]

    def _pods(self, labelSelector="", fieldSelector="", **_):  # noqa: N803 - as the API has it
        labels = dict(each.split("=") for each in labelSelector.split(",") if each)
        phases = {each.removeprefix("status.phase!=") for each in fieldSelector.split(",")}
        chosen = [
            pod
            for pod in self.pods.values()
            if labels.items() <= pod["metadata"]["labels"].items()
            and pod["status"]["phase"] not in phases
        ]
        return {"kind": "PodList", "apiVersion": "v1", "metadata": {}, "items": chosen}

    def _events(self):
        if self.refusal == "events":
            return _failed(403, "Forbidden", "events is forbidden: User may not list them")
        items = [] if self.refusal is None else [{"metadata": {}, **self.refusal}]
        return 200, {"kind": "EventList", "apiVersion": "v1", "metadata": {}, "items": items}

    def _bring_up_to_date(self):
        for name, process in [*self._processes.items()]:
            if (status := process.poll()) is not None:
                del self._processes[name]
                self._end(self.pods[name], status)
        for job in self.jobs.values():
            self._follow(job)
            phases = [pod["status"]["phase"] for pod in self._of(job)]
            job["status"]["active"] = sum(map(phases.count, ALIVE))
        alive = Counter(
            (pod["metadata"]["labels"][JOB], pod["metadata"]["labels"][INDEX])
            for pod in self.pods.values()
            if pod["status"]["phase"] in ALIVE
        )
        self.most = max(self.most, *alive.values(), 0)

    def _follow(self, job):
        """Do what the Job controller does, and the nodes: start pods, and read off their ends."""
        spec = job["spec"]
        ended = {"Succeeded": set(), "Failed": set()}
        for pod in self._of(job):
            phase = pod["status"]["phase"]
            if phase == "Succeeded" or (phase == "Failed" and not _is_ignored(pod, spec)):
                ended[phase].add(int(pod["metadata"]["labels"][INDEX]))
        job["status"] |= {
            "completedIndexes": ",".join(map(str, sorted(ended["Succeeded"]))),
            "failedIndexes": ",".join(map(str, sorted(ended["Failed"]))),
        }
        over = ended["Succeeded"] | ended["Failed"]
        if len(over) == spec["completions"]:
            # Before 1.31, a Job that is complete has no reason.
            end = {"type": "Complete"}
            if ended["Failed"]:
                end = {"type": "Failed", "reason": "FailedIndexes"}
            job["status"]["conditions"] = [end | {"status": "True"}]
        for index in sorted({*range(spec["completions"])} - over):
            alive = [pod for pod in self._of(job) if pod["status"]["phase"] in ALIVE]
            mine = [pod for pod in alive if pod["metadata"]["labels"][INDEX] == str(index)]
            free = len(alive) < spec["parallelism"] and not spec.get("suspend")
            if not mine and free and self.refusal is None:
                self._start(self._new_pod(job, index), job)
            elif mine and mine[0]["status"]["phase"] == "Pending" and index not in self.pending:
                self._start(mine[0], job)

    def _of(self, job):
        name = job["metadata"]["name"]
        return [pod for pod in self.pods.values() if pod["metadata"]["labels"][JOB] == name]

    def _new_pod(self, job, index):
        number = next(self._numbers)
        name = f"{job['metadata']['name']}-{index}-{number}"
        self.pods[name] = {
            "kind": "Pod",
            "apiVersion": "v1",
            "metadata": {
                "name": name,
                "namespace": job["metadata"]["namespace"],
                "annotations": {INDEX: str(index)},
                "labels": {INDEX: str(index), JOB: job["metadata"]["name"]},
                "creationTimestamp": f"2026-01-01T00:{number // 60:02}:{number % 60:02}Z",
            },
            "status": {"phase": "Pending"},
        }
        return self.pods[name]

    def _start(self, pod, job):
        index = pod["metadata"]["labels"][INDEX]
        pod["status"] = {"phase": "Pending"} | self.pending.get(int(index), {})
        if int(index) in self.pending:
            return
        container = job["spec"]["template"]["spec"]["containers"][0]
        variables = {each["name"]: each["value"] for each in container.get("env", ())}
        # https://kubernetes.io/docs/tasks/inject-data-application/define-command-argument-container/
        command = [word.replace("$$", "$") for word in container["command"]]
        self._processes[pod["metadata"]["name"]] = subprocess.Popen(
            command,
            env={"PATH": self._path, "JOB_COMPLETION_INDEX": index, **variables},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        pod["status"] = {"phase": "Running"}

    def _end(self, pod, status):
        end = {"exitCode": status, "reason": "Error" if status else "Completed"}
        pod["status"] |= {
            "phase": "Failed" if status else "Succeeded",
            "containerStatuses": [{"name": "main", "state": {"terminated": end}}],
        }

    def evict(self, index):
        """Have the node stop the pod of an index, as under the pressure of other pods."""
        with self.guard:
            name = self._running(index)
            status = self._stop(name)
            self._end(self.pods[name], status)
            self.pods[name]["status"] |= {"reason": "Evicted", "conditions": [DISRUPTION]}

    def delete_pod(self, index):
        """Do what 'kubectl delete pod' does."""
        with self.guard:
            name = self._running(index)
            self._end(self.pods[name], self._stop(name))

    def _running(self, index):
        (name,) = (
            name
            for name in self._processes
            if self.pods[name]["metadata"]["labels"][INDEX] == str(index)
        )
        return name

    def _stop(self, name):
        process = self._processes.pop(name)
        process.send_signal(signal.SIGTERM)
        return process.wait(PATIENCE)

    def close(self):
        """Stop all pods."""
        for name in [*self._processes]:
            self._stop(name)


def _is_ignored(pod, spec):
    conditions = pod["status"].get("conditions", ())
    rules = spec.get("podFailurePolicy", {}).get("rules", ())
    return any(
        rule["action"] == "Ignore"
        and any(wanted in conditions for wanted in rule["onPodConditions"])
        for rule in rules
    )


def _failed(code, reason, message):
    status = {"kind": "Status", "apiVersion": "v1", "status": "Failure"}
    return code, status | {"code": code, "reason": reason, "message": message}


@contextmanager
def one_machine_cluster(folder: Path, programs: Path):
    """Serve a cluster whose pods find their programs in a folder; yield it.

    KUBECONFIG has to name the file ``kubeconfig`` in the other folder.
    """
    cluster = Cluster(f"{programs}:/usr/bin:/bin")

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self):
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            status, document = cluster.answer(self.command, self.path, body)
            data = json.dumps(document).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_POST = do_DELETE = do_GET  # noqa: N815 - as http.server calls them

        def log_message(self, *_):
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,)).start()
        (folder / "kubeconfig").write_text(
            json.dumps(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "current-context": "test",
                    "contexts": [
                        {"name": "test", "context": {"cluster": "test", "namespace": "rl"}}
                    ],
                    "clusters": [
                        {
                            "name": "test",
                            "cluster": {"server": f"http://127.0.0.1:{server.server_port}"},
                        }
                    ],
                }
            )
        )
        try:
            yield cluster
        finally:
            cluster.close()
            server.shutdown()
