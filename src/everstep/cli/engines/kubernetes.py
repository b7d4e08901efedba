"""A job as Kubernetes objects: an Indexed Job with one pod per host, or a JobSet; pod 0 is the job's own host. Pure.

No cluster was at hand to try this on: the objects are checked against the schemas of Kubernetes alone.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from everstep.cli.engines.launch import FINAL, Launch, host_script

PORT = 29400
AGAIN = 75
"""Exit code of a pod that has to be made again; the job goes on meanwhile."""
_GRACE_S = 120
_LABEL = "everstep/job"
Object = dict[str, Any]


class Pods(NamedTuple):
    """Settings of the pods. claim: of the volume that all of them mount at /runs. queue: of Kueue, "" for none."""

    image: str
    claim: str
    cpus: str = ""
    memory: str = ""
    gpus: int = 0
    queue: str = ""
    namespace: str = ""


def indexed_job(launch: Launch, pods: Pods, token: str) -> list[Object]:
    """Secret, headless service and Job. token: the job's, in hex."""
    where = f"{launch.name}-0.{launch.name}"
    pod = _pod(launch, pods, "$JOB_COMPLETION_INDEX", where)
    spec = {**_job_spec(launch.hosts, pod, launch.name), "completionMode": "Indexed"}
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": _metadata(launch, pods, launch.name), "spec": spec}
    return [_secret(launch, pods, token), _service(launch, pods), job]


def job_set(launch: Launch, pods: Pods, token: str) -> list[Object]:
    """Secret and JobSet of a job for pod 0 and one for the agents."""
    where = f"{launch.name}-job-0-0.{launch.name}"
    replicated = [_replicated("job", 1, _pod(launch, pods, "0", where), launch)]
    if launch.hosts > 1:
        pod = _pod(launch, pods, "$((JOB_COMPLETION_INDEX + 1))", where)
        replicated.append(_replicated("agents", launch.hosts - 1, pod, launch))
    spec = {
        "network": {"enableDNSHostnames": True, "subdomain": launch.name, "publishNotReadyAddresses": True},
        "successPolicy": {"operator": "All", "targetReplicatedJobs": ["job"]},
        "failurePolicy": {"maxRestarts": 0},
        "replicatedJobs": replicated,
    }
    metadata = _metadata(launch, pods, launch.name)
    return [
        _secret(launch, pods, token),
        {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": metadata, "spec": spec},
    ]


def to_yaml(objects: list[Object]) -> str:
    """The objects as one stream of documents; texts of several lines stay readable."""
    import yaml

    class Dumper(yaml.SafeDumper):
        pass

    def text(dumper: Dumper, value: str) -> Any:
        style = "|" if "\n" in value else None
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)

    Dumper.add_representer(str, text)
    apart = json.loads(json.dumps(objects))  # repeated values are written out
    return yaml.dump_all(apart, Dumper=Dumper, sort_keys=False, width=120)


def _replicated(name: str, pods_count: int, pod: Object, launch: Launch) -> Object:
    spec = {**_job_spec(pods_count, pod, launch.name), "completionMode": "Indexed"}
    return {"name": name, "replicas": 1, "template": {"spec": spec}}


def _job_spec(count: int, pod: Object, container: str) -> Object:
    """Rules for pods: a pod that ends badly is made again by itself, the others go on; a pod lost with its node or
    preempted does not count; if no new one would help, all end."""
    codes = {"containerName": container, "operator": "In"}
    return {
        "completions": count,
        "parallelism": count,
        "backoffLimitPerIndex": 1000,
        "maxFailedIndexes": 0,
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": {
            "rules": [
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                {"action": "Ignore", "onExitCodes": {**codes, "values": [AGAIN]}},
                {"action": "FailJob", "onExitCodes": {**codes, "values": list(FINAL)}},
            ]
        },
        "template": pod,
    }


def _pod(launch: Launch, pods: Pods, index: str, where: str) -> Object:
    job = launch.job_words(f'"$POD_IP:{PORT}"')
    agent = launch.agent_words(f"{where}:{PORT}", f'"host-{index}"') + ' --address "$POD_IP"'
    script = host_script(launch, index, job, agent, f"code={AGAIN}", alone=True)
    leave = f'kill -USR1 1; [ "{index}" = 0 ] && sleep 20 || sleep 60'
    limits = {"cpu": pods.cpus, "memory": pods.memory, "nvidia.com/gpu": str(pods.gpus or "")}
    resources = {name: value for name, value in limits.items() if value}
    container = {
        "name": launch.name,
        "image": pods.image,
        "command": ["/bin/sh", "-c", script.replace("$", "$$")],  # else it halves them, and reads variables
        "env": [
            {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
            {
                "name": "EVERSTEP_TOKEN",
                "valueFrom": {"secretKeyRef": {"name": f"{launch.name}-token", "key": "token"}},
            },
        ],
        "ports": [{"name": "job", "containerPort": PORT}],
        "lifecycle": {"preStop": {"exec": {"command": ["/bin/sh", "-c", leave]}}},
        "resources": {"requests": resources, "limits": resources} if resources else {},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "runAsNonRoot": True,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "volumeMounts": [{"name": "runs", "mountPath": "/runs"}, {"name": "shm", "mountPath": "/dev/shm"}],
    }
    spread = {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": {_LABEL: launch.name}},
    }
    return {
        "metadata": {"labels": {_LABEL: launch.name}},
        "spec": {
            "subdomain": launch.name,
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": _GRACE_S,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "tolerations": [
                {
                    "key": f"node.kubernetes.io/{how}",
                    "operator": "Exists",
                    "effect": "NoExecute",
                    "tolerationSeconds": 30,
                }
                for how in ("not-ready", "unreachable")
            ],
            "topologySpreadConstraints": [spread],
            "securityContext": {"runAsUser": 1000, "runAsGroup": 1000, "fsGroup": 1000},
            "containers": [container],
            "volumes": [
                {"name": "runs", "persistentVolumeClaim": {"claimName": pods.claim}},
                {"name": "shm", "emptyDir": {"medium": "Memory"}},
            ],
        },
    }


def _secret(launch: Launch, pods: Pods, token: str) -> Object:
    """Secret with the token; it must not change, because pods that are made again need the token that the others
    have."""
    metadata = _metadata(launch, pods._replace(queue=""), f"{launch.name}-token")
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": metadata,
        "type": "Opaque",
        "immutable": True,
        "stringData": {"token": token},
    }


def _service(launch: Launch, pods: Pods) -> Object:
    metadata = _metadata(launch, pods._replace(queue=""), launch.name)
    spec = {
        "clusterIP": "None",
        "selector": {_LABEL: launch.name},
        "publishNotReadyAddresses": True,
        "ports": [{"name": "job", "port": PORT}],
    }
    return {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": spec}


def _metadata(launch: Launch, pods: Pods, name: str) -> Object:
    labels = {_LABEL: launch.name, **({"kueue.x-k8s.io/queue-name": pods.queue} if pods.queue else {})}
    return {"name": name, **({"namespace": pods.namespace} if pods.namespace else {}), "labels": labels}
