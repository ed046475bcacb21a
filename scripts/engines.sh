# shellcheck shell=bash
# To be sourced: starts Docker, or Podman's service, on a machine without a service manager.

# Start Docker and wait until it answers. Leaves its process id in .cache/dockerd.pid.
start_docker() {
  if [ -d /run/systemd/system ]; then
    systemctl start docker && docker_answers 300
    return
  fi
  mount_cgroups
  : >.cache/dockerd.log
  # Kernels and file systems differ in what they can overlay; vfs always works, slowly. The default
  # has a second attempt, because dockerd gives its containerd only 15 seconds to start.
  local storage
  for storage in "" "" vfs; do
    start_dockerd ${storage:+--storage-driver="$storage"} && return
  done
  printf 'setup: Docker does not start; see .cache/dockerd.log:\n' >&2
  tail -n 3 .cache/dockerd.log >&2
  return 1
}

# In a plain chroot nothing is mounted at /, but Docker and runc require a mount there. So the same
# tree is mounted at another place, in a mount namespace whose changes are not visible outside.
# shellcheck disable=SC2016 # for the shell that runs it
chroot_on_a_mount='
  nsenter --mount=/proc/$$/ns/mnt mount --make-rprivate / &&
  mount --rbind / /mnt && exec chroot /mnt "$@"'

# mountpoint(1) reports every / as a mount point.
is_mount_point() {
  awk -v path="$1" '$5 == path {found = 1} END {exit !found}' /proc/self/mountinfo
}

# Start a separate dockerd in its own network namespace. Runs have no network, so it needs neither a
# bridge nor firewall rules, and cannot interfere with those of another dockerd.
start_dockerd() {
  printf 'setup: starting Docker (log: .cache/dockerd.log)\n' >&2
  start_daemon dockerd dockerd --iptables=false --ip6tables=false --bridge=none "$@"
  docker_answers 300 && return
  # The next dockerd would not start while this one runs.
  kill "$(cat .cache/dockerd.pid)" 2>/dev/null || true
  wait "$(cat .cache/dockerd.pid)" || true
  rm -f .cache/dockerd.pid
  return 1
}

# Start Podman's service, which answers as Docker does, and wait until it answers.
start_podman() {
  mount_cgroups
  mkdir -p /run/podman
  rm -f /run/podman/podman.sock
  # Its monitors write a file "oom" into the folder in which they were started.
  start_daemon podman env --chdir=/run/podman podman system service --time 0 unix:///run/podman/podman.sock
  podman_answers 300 && return
  printf 'Podman does not start; see .cache/podman.log:\n' >&2
  tail -n 3 .cache/podman.log >&2
  return 1
}

# Wait up to $1 seconds for Podman's service to answer, or for ours to end.
podman_answers() { answers /run/podman/podman.sock podman "$1"; }

# Start a program in the background: $1 is its name in .cache, the rest is its command.
start_daemon() {
  local name=$1 namespaces=(unshare --net)
  shift
  if ! is_mount_point /; then namespaces=(unshare --net --mount --propagation unchanged
    bash -c "$chroot_on_a_mount" "$name"); fi
  setsid "${namespaces[@]}" "$@" >>".cache/$name.log" 2>&1 </dev/null 9>&- &
  echo $! >".cache/$name.pid"
}

# Wait up to $1 seconds for Docker to answer, or for our dockerd to end.
docker_answers() { answers /var/run/docker.sock dockerd "$1"; }

# Wait up to $3 seconds for an engine to answer at the socket $1, or for our daemon $2 to end. A
# socket may outlive the daemon that made it.
answers() {
  local tries
  for ((tries = 0; tries <= $3 * 5; tries++)); do
    python3 -c '
import socket, sys
with socket.socket(socket.AF_UNIX) as engine:
    engine.connect(sys.argv[1])
    engine.sendall(b"GET /_ping HTTP/1.0\r\n\r\n")
    assert b" 200 " in engine.recv(64)' "$1" 2>/dev/null && return
    if [ -e ".cache/$2.pid" ]; then
      kill -0 "$(cat ".cache/$2.pid")" 2>/dev/null || return 1
    fi
    sleep 0.2
  done
  return 1
}

# Mount the cgroup hierarchies of the kernel that the machine has not mounted. With version 1, Docker
# reports memory exhaustion only if every hierarchy is mounted.
mount_cgroups() {
  local root=/sys/fs/cgroup hierarchies name
  mapfile -t hierarchies < <(cut -d: -f2 /proc/self/cgroup | sed '/^$/d')
  if [ ${#hierarchies[@]} -eq 0 ]; then
    is_mount_point "$root" || mount -t cgroup2 cgroup2 "$root"
    return
  fi
  is_mount_point "$root" || mount -t tmpfs -o mode=755 cgroup "$root"
  for name in "${hierarchies[@]}"; do
    if awk -v want="$name" '$3 == "cgroup" && index("," $4 ",", "," want ",") {found = 1}
      END {exit !found}' /proc/self/mounts; then continue; fi
    mkdir -p "$root/${name#name=}"
    mount -t cgroup -o "${name/#name=/none,name=}" cgroup "$root/${name#name=}" || true
  done
}
