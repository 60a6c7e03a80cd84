#!/usr/bin/env bash
# Run Slurm from Debian's packages on this machine, for tests. Needs root, e.g. in a container.
#
#   scripts/local_slurm.sh up      # install missing packages, start Slurm, wait until its nodes are idle
#   scripts/local_slurm.sh down    # stop the daemons and remove their state
#
# SLURM_LOCAL_NODES (default 2) is the number of nodes, each a slurmd with a separate port. SLURM_LOCAL_CPUS
# (default 32) is the number of CPUs that each node reports, even if the machine has fewer.
set -euo pipefail

STATE=/var/lib/adaecho-slurm
NODES=${SLURM_LOCAL_NODES:-2}
CPUS=${SLURM_LOCAL_CPUS:-32}
FIRST_PORT=6820
WAIT_S=60

install_packages() {
    command -v slurmctld >/dev/null && command -v munged >/dev/null && return
    export DEBIAN_FRONTEND=noninteractive
    apt-get -qq update
    apt-get -qq install --yes --no-install-recommends slurm-wlm munge >/dev/null
}

nodes() { # named by addresses of this machine, so that every program can resolve them
    local node
    for ((node = 1; node <= NODES; node++)); do
        echo "NodeName=127.0.0.$node NodeHostname=$(hostname -s) NodeAddr=$(hostname -s) Port=$((FIRST_PORT + node)) CPUs=$CPUS" \
            "RealMemory=$((CPUS * 4096)) State=UNKNOWN"
    done
}

write_config() {
    mkdir -p "$STATE/ctld" "$STATE/d" /etc/slurm
    cat >/etc/slurm/slurm.conf <<CONF
ClusterName=local
SlurmctldHost=$(hostname -s)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SchedulerParameters=sched_interval=2,bf_interval=2
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
# Listen only on the address of this machine's host name, not on all addresses.
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
# Accept the configured number of CPUs, even if the machine has fewer.
SlurmdParameters=config_overrides
JobRequeue=1
ReturnToService=2
MaxArraySize=1001
KillWait=5
StateSaveLocation=$STATE/ctld
SlurmdSpoolDir=$STATE/d/%n
SlurmctldPidFile=$STATE/slurmctld.pid
SlurmdPidFile=$STATE/slurmd.%n.pid
SlurmctldLogFile=$STATE/slurmctld.log
SlurmdLogFile=$STATE/slurmd.%n.log
$(nodes)
PartitionName=local Nodes=ALL Default=YES MaxTime=INFINITE State=UP
CONF
}

start_munge() {
    [ -f /etc/munge/munge.key ] || mungekey --create
    mkdir -p /run/munge /var/lib/munge /var/log/munge
    chown -R munge: /etc/munge /run/munge /var/lib/munge /var/log/munge
    chmod 0755 /run/munge
    pgrep -x munged >/dev/null || su -s /bin/sh munge -c munged
}

up() {
    install_packages
    write_config
    start_munge
    pgrep -x slurmctld >/dev/null || slurmctld
    for ((node = 1; node <= NODES; node++)); do
        pgrep -x -F "$STATE/slurmd.127.0.0.$node.pid" slurmd >/dev/null 2>&1 || slurmd -N "127.0.0.$node"
    done
    for ((second = 0; second < WAIT_S; second++)); do
        if [ "$(sinfo --noheader --Node --format=%T 2>/dev/null | grep -cE '^(idle|mixed|allocated)$')" = "$NODES" ]; then
            sinfo && return
        fi
        sleep 1
    done
    echo "slurm did not start within $WAIT_S s; the ends of its logs:" >&2
    tail -n 20 "$STATE"/*.log >&2
    exit 1
}

stop() { # stop the daemon with this PID file, and wait until it has written its state
    local pid
    pid=$(cat "$1" 2>/dev/null) || return 0
    kill "$pid" 2>/dev/null || return 0
    for ((tenth = 0; tenth < 10 * WAIT_S; tenth++)); do
        kill -0 "$pid" 2>/dev/null || return 0
        sleep 0.1
    done
    kill -KILL "$pid"
}

down() {
    scancel --user=root --quiet 2>/dev/null || true
    for pid_file in "$STATE"/slurmd*.pid; do stop "$pid_file"; done
    stop "$STATE/slurmctld.pid"
    stop /run/munge/munged.pid
    rm -rf "$STATE"
}

case "${1:-}" in
    up | down) "$1" ;;
    *) sed -n '2,8s/^# \{0,1\}//p' "$0" && exit 2 ;;
esac
