# Sourced by what installs from Debian's packages, after it has set $target.

# Fresh package lists: the system's for root, else lists of our own.
update_lists() {
  if [ "$(id -u)" != 0 ]; then
    mkdir -p "$target/apt/lists/partial" "$target/apt/cache/archives/partial"
    cat > "$target/apt/apt.conf" <<- CONF
	Dir::State "$target/apt";
	Dir::State::status "/var/lib/dpkg/status";
	Dir::Cache "$target/apt/cache";
	CONF
    export APT_CONFIG="$target/apt/apt.conf"
  fi
  apt-get update > "$log" 2>&1
}
