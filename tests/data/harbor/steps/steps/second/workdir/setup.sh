[ "$(pwd)" = /tmp ] && echo set > /tmp/set-up
