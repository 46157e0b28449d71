// Loaded with LD_PRELOAD into the tasks of a local cluster: TensorFlow's gRPC server listens on all
// interfaces whatever its address says (it asks for "0.0.0.0:port"), and has no option to change
// that. Here the wildcard address of the task's own port becomes the loopback address; any other
// bind is left as it is, so that a program may still open public ports of its own.
//
// A library of its own, free of TensorFlow and of libstdc++, as it goes into every process of the
// task, Python and others.
#include <arpa/inet.h>
#include <dlfcn.h>
#include <netinet/in.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

namespace {

using BindFunction = int (*)(int, const sockaddr*, socklen_t);

// The port that gba_tf.local_cluster set for this task; 0 if there is none.
in_port_t TaskPort() {
  const char* port = getenv("GBA_TF_LOOPBACK_PORT");
  return port == nullptr ? 0 : htons(static_cast<uint16_t>(atoi(port)));
}

bool IsIpv6Only(int fd) {
  int value = 0;
  socklen_t size = sizeof(value);
  return getsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &value, &size) == 0 && value != 0;
}

}  // namespace

extern "C" __attribute__((visibility("default"))) int bind(int fd, const sockaddr* address,
                                                           socklen_t size) {
  // Not kept in a static: its guard would need libstdc++, and a bind is rare.
  const BindFunction next_bind = reinterpret_cast<BindFunction>(dlsym(RTLD_NEXT, "bind"));
  const in_port_t port = TaskPort();
  if (port == 0 || address == nullptr) return next_bind(fd, address, size);

  if (address->sa_family == AF_INET && size >= sizeof(sockaddr_in)) {
    sockaddr_in local;
    memcpy(&local, address, sizeof(local));
    if (local.sin_port == port && local.sin_addr.s_addr == htonl(INADDR_ANY)) {
      local.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
      return next_bind(fd, reinterpret_cast<const sockaddr*>(&local), sizeof(local));
    }
  } else if (address->sa_family == AF_INET6 && size >= sizeof(sockaddr_in6)) {
    sockaddr_in6 local;
    memcpy(&local, address, sizeof(local));
    if (local.sin6_port == port && IN6_IS_ADDR_UNSPECIFIED(&local.sin6_addr)) {
      // gRPC prefers one socket for both protocols. The tasks' addresses are 127.0.0.1, which such
      // a socket serves as ::ffff:127.0.0.1; one that only speaks IPv6 can only have ::1.
      inet_pton(AF_INET6, IsIpv6Only(fd) ? "::1" : "::ffff:127.0.0.1", &local.sin6_addr);
      return next_bind(fd, reinterpret_cast<const sockaddr*>(&local), sizeof(local));
    }
  }
  return next_bind(fd, address, size);
}
