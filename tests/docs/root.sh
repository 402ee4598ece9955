# root.sh ROOT LAID COMMAND...: run a command in this folder, with /data and /models as the documentation has them.
# To be started by `unshare --mount --map-root-user`: nothing of it is seen, or stays, outside.
set -euo pipefail
root=$1 laid=$2
shift 2
mount -t tmpfs none "$root"
for path in /*; do
    if [ -L "$path" ]; then
        cp -P "$path" "$root/"
    elif [ -d "$path" ]; then
        mkdir "$root$path" && mount --rbind "$path" "$root$path"
    fi
done
cp -r "$laid/data" "$root/data"
mkdir "$root/models" && ln -s "$laid"/models/* "$root/models/"
for folder in laion laion400m; do # as many shards as their brace lists name
    python3 -c 'import os, sys; [os.link(sys.argv[1] + "00000.tar", f"{sys.argv[1]}{i:05}.tar") for i in range(1, 41456)]' "$root/data/$folder/"
done
exec chroot "$root" env -C "$PWD" "$@"
