// CoreDNS with the plugins that a cluster's resolver needs; plugins for cloud providers are left out.
package main

import (
	"github.com/coredns/coredns/core/dnsserver"
	"github.com/coredns/coredns/coremain"
	_ "github.com/coredns/coredns/plugin/cache"
	_ "github.com/coredns/coredns/plugin/errors"
	_ "github.com/coredns/coredns/plugin/forward"
	_ "github.com/coredns/coredns/plugin/kubernetes"
	_ "github.com/coredns/coredns/plugin/ready"
)

func main() {
	// Plugins answer in this order.
	dnsserver.Directives = []string{"ready", "errors", "cache", "kubernetes", "forward"}
	coremain.Run()
}
