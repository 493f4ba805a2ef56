# Sourced by every script here: makes .venv if need be, and finds Java for those that need it.
#
# A script that needs no more than a node does says `needs=server` first: it gets that extra alone,
# and neither PySpark nor the tools that check and test, which are half a gigabyte and a minute.
# Whatever was installed before stays.
#
# Leaves behind: `root`, .venv's programs first in PATH, scripts/ in PYTHONPATH, DELAYWHEEL_CACHE
# (all that is fetched is kept in that one folder), JAVA_HOME where `need_java` was called. The
# working folder stays the caller's: paths among the arguments are theirs.
# A warm start costs one checksum: a stamp in .venv for each set of packages says which pins it was
# installed with, and for which folder.
# Several scripts may start at once: a lock lets one of them install.
# shellcheck shell=bash
set -euo pipefail

needs=${needs:-dev}
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
venv="$root/.venv"
export DELAYWHEEL_CACHE="${DELAYWHEEL_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/delaywheel}"
wheels="$DELAYWHEEL_CACHE/wheels"

say() { printf '%s\n' "$*" >&2; }

die() {
  say "error: $*"
  exit 1
}

# Runs a command that may take a while, and says every five seconds that it still runs.
waiting_for() {
  local what=$1 began=$SECONDS ticker status=0
  shift
  # A sleep that outlives the command by some seconds keeps nothing open, and no lock.
  (while sleep 5 >/dev/null 2>&1 9>&-; do say "  $what: $((SECONDS - began)) s"; done) &
  ticker=$!
  "$@" || status=$?
  kill "$ticker" 2>/dev/null
  wait "$ticker" 2>/dev/null || true
  return "$status"
}

# What runs as root may install a system package, the first of these names that there is;
# otherwise what is missing is named.
install_system_package() {
  local manager name
  [[ $(id -u) == 0 ]] || return 1
  manager=$(command -v apt-get || command -v dnf) || return 1
  [[ $manager == */apt-get ]] && "$manager" update -qq >&2
  for name in "$@"; do
    say "installing $name with $manager"
    DEBIAN_FRONTEND=noninteractive "$manager" install -q -y "$name" >&2 && return
  done
  return 1
}

# --- Python ----------------------------------------------------------------------------------

# The system's own comes first: distributions compile it with a profile, version managers mostly do
# not, and everything takes a tenth more CPU time with theirs.
find_python() {
  local candidate wanted='import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))'
  for candidate in "${DELAYWHEEL_PYTHON:-}" \
    $(type -ap python3.11 python3.12 python3.13 | grep '^/usr/bin/') \
    python3.11 python3.12 python3.13 python3; do
    if [[ -n $candidate ]] && "$candidate" -c "$wanted" >/dev/null 2>&1; then
      printf '%s\n' "$candidate"
      return
    fi
  done
  return 1
}

make_environment() {
  local python
  if ! python=$(find_python); then
    install_system_package python3-venv python3 || true
    python=$(find_python) || die "no Python 3.11 or newer with its venv module was found" \
      "(Debian, Ubuntu: python3-venv); DELAYWHEEL_PYTHON may name one"
  fi
  say "making .venv with $("$python" --version)"
  rm -rf "$venv" # a link to another project's environment is not to be emptied
  "$python" -m venv "$venv"
}

stamp_of_now() {
  cat "$root/pyproject.toml" "$root/constraints.txt" | sha256sum | cut -d ' ' -f 1
  printf '%s\n' "$root"
}

stamp_of() {
  [[ $1 == dev ]] && printf '%s\n' "$venv/delaywheel-stamp" || printf '%s\n' "$venv/delaywheel-stamp-$1"
}

# Whoever develops has what a node needs, too.
is_installed() {
  local now set
  [[ -x $venv/bin/python ]] || return 1
  now=$(stamp_of_now)
  for set in dev "$needs"; do
    [[ "$(cat "$(stamp_of "$set")" 2>/dev/null)" == "$now" ]] && return
  done
  return 1
}

# Everything that is installed lies in the cache as wheels: not every index lets pip keep what it
# has sent, and pip asks it about each package again. PySpark is published as source alone: without
# PEP 517 the pip of Debian 12 builds it in a .venv that has no `wheel`. What builds it is pinned as
# well: pip passes the variable on, but not the option.
fetch_wheels() {
  PIP_CACHE_DIR="$DELAYWHEEL_CACHE/pip" PIP_CONSTRAINT="file://${root// /%20}/constraints.txt" \
    waiting_for fetching "$venv/bin/python" -m pip wheel \
    --disable-pip-version-check --wheel-dir "$wheels" --use-pep517 \
    "$root[$needs]" hatch-vcs hatchling editables |
    { grep --line-buffered -oE 'Downloading .{1,72}' || true; } >&2 ||
    die "fetching failed; it continues from here when this is run again"
  rm -f "$wheels"/delaywheel-*.whl # ours is installed from where it is
}

# What is never imported need not be compiled; Python keeps what it compiles on the way.
install_wheels() {
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-index --no-compile \
    --find-links "$wheels" --constraint "$root/constraints.txt" --editable "$root[$needs]" >&2
}

install_what_is_cached() {
  [[ -n $(ls "$wheels") ]] && install_wheels 2>/dev/null
}

install() {
  is_installed && return # another script was quicker
  # Programs in .venv carry its path: one that came along with a copy of the folder is of no use.
  local stamp made_for=$root
  for stamp in "$venv"/delaywheel-stamp*; do
    if [[ -r $stamp ]]; then { read -r _ && read -r made_for; } <"$stamp"; fi
  done
  if [[ $made_for != "$root" ]] || ! "$venv/bin/python" -c 'import pip' 2>/dev/null; then
    make_environment
  fi
  if [[ $needs == dev ]]; then
    say "installing delaywheel, and what checks and tests it, into .venv (900 MB; minutes at first)"
  else
    say "installing delaywheel[$needs] into .venv (350 MB)"
  fi
  # Where the cache has everything, no index is asked; where it has not, that shows in a second.
  if ! waiting_for installing install_what_is_cached; then
    fetch_wheels
    waiting_for installing install_wheels ||
      die "the installation failed; it continues from here when this is run again"
  fi
  stamp_of_now >"$(stamp_of "$needs")"
}

if ! is_installed; then
  mkdir -p "$wheels"
  (flock 9 && install) 9>"$DELAYWHEEL_CACHE/install.lock"
fi
export PATH="$venv/bin:$PATH" PYTHONPATH="$root/scripts"
# Some images forbid Python to keep what it has compiled: each start of a node would compile our
# modules anew, which is most of what a start takes.
unset PYTHONDONTWRITEBYTECODE

# --- Java, for the broker --------------------------------------------------------------------

# Kafka 4 runs on Java 17 and newer.
java_is_usable() {
  local version
  version=$("$1/bin/java" -version 2>&1 | sed -n 's/.* version "\([0-9]*\).*/\1/p') || return 1
  [[ -n $version ]] && ((version >= 17 && version <= 25))
}

find_java_home() {
  local candidate on_path=""
  if command -v java >/dev/null; then
    on_path=$(dirname "$(dirname "$(readlink -f "$(command -v java)")")")
  fi
  for candidate in "${JAVA_HOME:-}" "$on_path" /usr/lib/jvm/*; do
    if [[ -n $candidate ]] && java_is_usable "$candidate"; then
      printf '%s\n' "$candidate"
      return
    fi
  done
  return 1
}

need_java() {
  if ! JAVA_HOME=$(find_java_home); then
    install_system_package openjdk-21-jre-headless openjdk-17-jre-headless \
      java-21-openjdk-headless || true
    JAVA_HOME=$(find_java_home) || die "Kafka needs Java 17 or newer and none was found" \
      "(Debian, Ubuntu: openjdk-17-jre-headless); JAVA_HOME may name one"
  fi
  export JAVA_HOME
}

# For a broker: Java, and what fetches Kafka's jars where they are not in the cache yet. That is
# Ivy, which a Maven brings as well (local/loopback/kafka_jars.py).
need_broker() {
  need_java
  compgen -G "$DELAYWHEEL_CACHE/kafka-*/*.jar" >/dev/null || [[ -e /usr/share/java/ivy.jar ]] ||
    command -v mvn >/dev/null || install_system_package ivy || true
}
