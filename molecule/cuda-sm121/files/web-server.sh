#!/bin/sh
# Stands for an nginx with sites of its own, as far as systemd sees it. It keeps count of its reloads.
set -eu
printf '[Service]\nExecStart=/usr/bin/sleep infinity\nExecReload=/bin/sh -c "echo reload >> /srv/reloads"\n' > /etc/systemd/system/nginx.service
systemctl daemon-reload
systemctl start nginx.service
