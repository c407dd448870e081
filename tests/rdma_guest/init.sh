#!/bin/sh
# The guest's first process: modules, the host's files under a throw-away overlay, one command, power off.
# image.py packs it as /init; boot.py appends /command, and reads status from the shared folder "out".
b=/bin/busybox
$b mount -t proc proc /proc
$b mount -t sysfs sys /sys
$b mount -t devtmpfs dev /dev
while read -r module; do
  $b insmod "/modules/$module" || $b echo "module $module does not load"
done < /modules/order

share() { # TAG FOLDER OPTIONS: a folder of the host
  $b mount -t 9p -o "trans=virtio,version=9p2000.L,msize=512000,access=any,$3" "$1" "$2"
}
share host /host ro,cache=loose
$b mount -t tmpfs -o mode=755 scratch /scratch
$b mkdir /scratch/upper /scratch/work
$b mount -t overlay -o lowerdir=/host,upperdir=/scratch/upper,workdir=/scratch/work overlay /merged

for kind in proc sysfs devtmpfs; do
  case $kind in proc) at=proc ;; sysfs) at=sys ;; *) at=dev ;; esac
  $b mount -t $kind $kind /merged/$at
done
$b mkdir -p /merged/dev/pts /merged/dev/shm
$b mount -t devpts devpts /merged/dev/pts
$b mount -t tmpfs tmpfs /merged/dev/shm
$b mount -t tmpfs tmpfs /merged/run
$b mkdir /merged/run/hostout
share out /merged/run/hostout trans=virtio
$b ifconfig lo 127.0.0.1 up
$b cp /command /merged/run/command

ulimit -l unlimited
export HOME=/root PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
$b chroot /merged /bin/bash /run/command > /dev/hvc0 2>&1 < /dev/null
$b echo $? > /merged/run/hostout/status
$b sync
$b poweroff -f
