"""A job as Kubernetes objects: an Indexed Job with one pod per host, or a JobSet; pod 0 is the job's own host. Pure.

No cluster was at hand to try this on: the objects are checked against the schemas of Kubernetes alone.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from everstep.cli.engines.launch import FINAL, Launch, host_script, in_brackets

PORT = 29400
AGAIN = 75
"""Exit code of a pod that handed over, and has to be made again; the job goes on meanwhile."""
OVER = 64
"""Exit code of a pod whose host led the job when that ended for good: no new pod would help."""
_TRIES = 20
"""Times that the pod of an index may be made again because it was killed, or waited in vain."""
_GRACE_S = 120
_KEPT_S = 7 * 24 * 3600
_LABEL = "everstep/job"
Object = dict[str, Any]


class Pods(NamedTuple):
    """Settings of the pods. claim: of the volume that they mount at /runs, "" if each has a disk of its own; once: only
    the job's own pod mounts it. disk: size of each pod's own disk. shm: size of /dev/shm. queue: of Kueue, "" for
    none."""

    image: str
    claim: str = ""
    once: bool = False
    disk: str = ""
    cpus: str = ""
    memory: str = ""
    shm: str = ""
    gpus: int = 0
    port: int = PORT
    queue: str = ""
    namespace: str = ""


def indexed_job(launch: Launch, pods: Pods) -> list[Object]:
    """Headless service, Job, and what guards its pods."""
    where = f"{launch.name}-0.{launch.name}"
    pod = _pod(launch, pods, "$JOB_COMPLETION_INDEX", where)
    spec = {**_job_spec(launch.hosts, pod, launch.name), "completionMode": "Indexed"}
    spec["ttlSecondsAfterFinished"] = _KEPT_S
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": _metadata(launch, pods, launch.name), "spec": spec}
    return [_service(launch, pods), job, *_guards(launch, pods)]


def job_set(launch: Launch, pods: Pods) -> list[Object]:
    """JobSet of a job for pod 0 and one for the agents, and what guards its pods."""
    where = f"{launch.name}-job-0-0.{launch.name}"
    replicated = [_replicated("job", 1, _pod(launch, pods, "0", where), launch)]
    if launch.hosts > 1:
        agents = pods._replace(claim="") if pods.once else pods
        pod = _pod(launch, agents, "$((JOB_COMPLETION_INDEX + 1))", where, refused=_STAYS_AWAY)
        replicated.append(_replicated("agents", launch.hosts - 1, pod, launch))
    spec = {
        "network": {"enableDNSHostnames": True, "subdomain": launch.name, "publishNotReadyAddresses": True},
        "successPolicy": {"operator": "All", "targetReplicatedJobs": ["job"]},
        "failurePolicy": {"maxRestarts": 0},
        "ttlSecondsAfterFinished": _KEPT_S,
        "replicatedJobs": replicated,
    }
    metadata = _metadata(launch, pods, launch.name)
    found = {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": metadata, "spec": spec}
    return [found, *_guards(launch, pods)]


def secret(launch: Launch, pods: Pods, token: str) -> Object:
    """Secret with the token, in hex; never printed. It must not change, because pods that are made again need the token
    that the others have."""
    metadata = _metadata(launch, pods._replace(queue=""), f"{launch.name}-token")
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": metadata,
        "type": "Opaque",
        "immutable": True,
        "stringData": {"token": token},
    }


def secret_words(launch: Launch, pods: Pods) -> str:
    """Comment for printed objects: commands that make the Secret, whose content is not printed."""
    inside = f" -n {pods.namespace}" if pods.namespace else ""
    name = f"{launch.name}-token"
    return (
        "# The Secret with the job's token is not printed. To make it:\n"
        f"#   openssl rand -hex 32 | tr -d '\\n' | kubectl create secret generic {name}{inside} "
        "--from-file=token=/dev/stdin\n"
        f"#   kubectl label secret {name}{inside} {_LABEL}={launch.name}\n"
    )


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
    """Rules for pods. Only the end of the host that leads ends all. A pod that ends badly is made again by itself, so
    many times and later and later; one that left in order, or was lost with its node or preempted, does not count; an
    agent that is refused is not made again, and the others go on."""
    codes = {"containerName": container, "operator": "In"}
    return {
        "completions": count,
        "parallelism": count,
        "backoffLimitPerIndex": _TRIES,
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": {
            "rules": [
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                {"action": "Ignore", "onExitCodes": {**codes, "values": [AGAIN]}},
                {"action": "FailJob", "onExitCodes": {**codes, "values": [OVER]}},
                {"action": "FailIndex", "onExitCodes": {**codes, "values": [code for code in FINAL if code != 1]}},
            ]
        },
        "template": pod,
    }


_STAYS_AWAY = '[ "$code" = 1 ] || code=0'
"""Has a refused agent of a JobSet be done: a JobSet fails with any of its Jobs."""
_LIVES = (
    "for child in $(cat /proc/1/task/1/children); do grep -q '^State:.[TZ]' /proc/$child/status && exit 1; done; exit 0"
)
"""Fails if the host's process is stopped, or dead and not waited for. Everstep watches the rest by itself."""


_BATCH = "batch.kubernetes.io/"
_COUNTS = {"POD_FAILURES": "job-index-failure-count", "POD_IGNORED": "job-index-ignored-failure-count"}
"""Variables with the annotations by which Kubernetes says how many pods of this index have failed before this one; the
second is absent for none."""
_KNOWN = '[ -e "$dir/job.json" ] || [ "${POD_FAILURES:-0}${POD_IGNORED:-0}" != 00 ]'
"""Disks of pods' own are empty in each new pod."""


def _pod(launch: Launch, pods: Pods, index: str, where: str, refused: str = ":") -> Object:
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
            "topologySpreadConstraints": [
                {
                    "maxSkew": 1,
                    "topologyKey": "kubernetes.io/hostname",
                    "whenUnsatisfiable": "ScheduleAnyway",
                    "labelSelector": {"matchLabels": {_LABEL: launch.name}},
                }
            ],
            "securityContext": {
                "runAsUser": 1000,
                "runAsGroup": 1000,
                "fsGroup": 1000,
                "fsGroupChangePolicy": "OnRootMismatch",
            },
            "containers": [_container(launch, pods, index, where, refused)],
            "volumes": [
                {"name": "runs", **_runs(pods)},
                {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": pods.shm or f"{2 * launch.slots}Gi"}},
            ],
        },
    }


def _container(launch: Launch, pods: Pods, index: str, where: str, refused: str) -> Object:
    job = launch.job_words(f'"$POD_IP:{pods.port}"')
    agent = launch.agent_words(f"{where}:{pods.port}", f'"host-{index}"') + ' --address "$POD_IP"'
    agent += ' --run-dir "$dir"' if launch.etcd else ""
    ends = {"in_vain": "leaving=", "killed": "leaving=", "final": f"code={OVER}"}
    ends |= {"refused": refused, "known": _KNOWN}
    script = in_brackets("POD_IP") + host_script(launch, index, job, agent, f"code={AGAIN}", alone=True, **ends)
    leave = f'kill -USR1 1; [ "{index}" = 0 ] && sleep 20 || sleep 60'
    if launch.etcd:  # the host that leads gives that up first
        leave = "kill -USR1 1; sleep 15; kill -USR1 1; sleep 45"
    limits = {"cpu": pods.cpus or str(launch.slots), "memory": pods.memory or f"{4 * launch.slots}Gi"}
    limits |= {"nvidia.com/gpu": str(pods.gpus)} if pods.gpus else {}
    token = {"name": f"{launch.name}-token", "key": "token"}
    return {
        "name": launch.name,
        "image": pods.image,
        "command": ["/bin/sh", "-c", script.replace("$", "$$")],  # else it halves them, and reads variables
        "env": [
            {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
            {"name": "EVERSTEP_TOKEN", "valueFrom": {"secretKeyRef": token}},
            *(
                {"name": name, "valueFrom": {"fieldRef": {"fieldPath": f"metadata.annotations['{_BATCH}{key}']"}}}
                for name, key in (_COUNTS if launch.etcd else {}).items()
            ),
        ],
        "ports": [{"name": "job", "containerPort": pods.port}],
        "lifecycle": {"preStop": {"exec": {"command": ["/bin/sh", "-c", leave]}}},
        "livenessProbe": {
            "exec": {"command": ["/bin/sh", "-c", _LIVES]},
            "initialDelaySeconds": 30,
            "periodSeconds": 20,
            "timeoutSeconds": 10,
            "failureThreshold": 6,
        },
        "resources": {"requests": limits, "limits": limits},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "runAsNonRoot": True,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "volumeMounts": [{"name": "runs", "mountPath": "/runs"}, {"name": "shm", "mountPath": "/dev/shm"}],
    }


def _runs(pods: Pods) -> Object:
    """The volume at /runs."""
    if pods.claim:
        return {"persistentVolumeClaim": {"claimName": pods.claim}}
    if not pods.disk:
        return {"emptyDir": {}}
    spec = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": pods.disk}}}
    return {"ephemeral": {"volumeClaimTemplate": {"spec": spec}}}


def _service(launch: Launch, pods: Pods) -> Object:
    metadata = _metadata(launch, pods._replace(queue=""), launch.name)
    spec = {
        "clusterIP": "None",
        "selector": {_LABEL: launch.name},
        "publishNotReadyAddresses": True,
        "ipFamilyPolicy": "PreferDualStack",  # IPv4, IPv6 or both, as the cluster has it
        "ports": [{"name": "job", "port": pods.port}],
    }
    return {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": spec}


def _guards(launch: Launch, pods: Pods) -> list[Object]:
    """A budget, so that nodes are drained one by one, and a rule that lets only pods of the job speak to each other."""
    own = {"matchLabels": {_LABEL: launch.name}}
    metadata = _metadata(launch, pods._replace(queue=""), launch.name)
    # A budget for pods of a Job knows no number of them, and so must say how many are to stay.
    budget = {"minAvailable": launch.hosts - 1, "selector": own}
    rule = {"podSelector": own, "policyTypes": ["Ingress"], "ingress": [{"from": [{"podSelector": own}]}]}
    return [
        {"apiVersion": "policy/v1", "kind": "PodDisruptionBudget", "metadata": metadata, "spec": budget},
        {"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": metadata, "spec": rule},
    ]


def _metadata(launch: Launch, pods: Pods, name: str) -> Object:
    labels = {_LABEL: launch.name, **({"kueue.x-k8s.io/queue-name": pods.queue} if pods.queue else {})}
    return {"name": name, **({"namespace": pods.namespace} if pods.namespace else {}), "labels": labels}
