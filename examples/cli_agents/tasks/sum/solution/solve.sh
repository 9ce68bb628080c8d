seq 1 8 > /srv/numbers; echo 36 > /srv/sum
