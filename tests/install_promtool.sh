#!/bin/sh
# Puts a promtool that runs into the folder $1; no Prometheus is installed or started.
# Takes the one that PATH has, else the one in Debian's package prometheus, of which the rest is
# deleted again.
set -eu

target=$1
mkdir -p "$target"
target=$(cd "$target" && pwd)
package=$target/package
log=$target/install.log
. "$(dirname "$0")/apt_lists.sh"

fail() {
  [ ! -s "$log" ] || cat "$log" >&2
  echo "promtool: $1" >&2
  exit 1
}

download() {
  (cd "$package" && apt-get download prometheus) > "$log" 2>&1
}

: > "$log"
rm -rf "$package" "$target/promtool"
if program=$(command -v promtool); then
  printf '#!/bin/sh\nexec "%s" "$@"\n' "$program" > "$target/promtool"
  chmod +x "$target/promtool"
  exit 0
fi

command -v apt-get > /dev/null || fail "install it (https://prometheus.io) where PATH finds it"

mkdir "$package"
download || { update_lists && download; } || fail "cannot download the package prometheus"
dpkg -x "$package"/prometheus_*.deb "$package" > "$log" 2>&1 || fail "cannot unpack its package"
mv "$package/usr/bin/promtool" "$target/promtool"
rm -rf "$package" "$target/apt"
"$target/promtool" --version > "$log" 2>&1 || fail "it does not run"
