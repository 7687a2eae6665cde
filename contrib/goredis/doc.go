// Package goredis creates redlatch clients from the options of go-redis
// (github.com/redis/go-redis/v9), for services that already configure it:
//
//	opt, err := redis.ParseURL(url)
//	...
//	rdb := redis.NewClient(opt)
//	locks, err := goredis.Open(ctx, opt)
//
// The redlatch client has connections of its own, to the same server, database and user. It chooses
// between a server, a cluster and sentinels by the type of the options, as go-redis does.
//
// The lists below name every field of redis.Options, redis.ClusterOptions, redis.FailoverOptions and
// redis.UniversalOptions.
//
// # Translated fields
//
//   - Addr, Network, Addrs, SentinelAddrs, MasterName, IsClusterMode: where the server is. A path is that
//     of a unix socket.
//   - DB: the database. UniversalOptions have none for a cluster.
//   - Username, Password, SentinelUsername, SentinelPassword: a name without a password is not sent, as
//     in go-redis.
//   - CredentialsProvider, CredentialsProviderContext: asked for each new connection, within DialTimeout
//     (5 s by default).
//   - StreamingCredentialsProvider: asked for each new connection. Unless Protocol is 2, it is asked again
//     each minute, and the connection logs in with the answer.
//   - ClientName: the name of the connections, those to sentinels included.
//   - DisableIdentity, DisableIndentity: no CLIENT SETINFO.
//   - Protocol: 2, or else 3 if the server has it.
//   - TLSConfig: of the servers and the sentinels. With a Dialer, TLS is the Dialer's task.
//   - Dialer: dials all connections, within DialTimeout.
//   - DialTimeout, ReadTimeout: the timeouts of connections and of replies. Unlike in go-redis, there is
//     always a limit: it is 3 s if a field is zero or negative. Options that a go-redis client returns
//     contain its default, 5 s.
//   - ConnMaxLifetime: connections are replaced after this time.
//   - ClusterStateReloadInterval: 0 means after redirections only.
//
// # Refused fields
//
// These fields change connections or nodes in ways that redlatch cannot repeat. If they are set, the
// error matches lock.ErrInvalid. A caller who knows that they do not matter to locks clears them in a
// copy of the options.
//
//   - OnConnect: a hook with a connection of go-redis, which may log in or select a database.
//   - NewClient: a function that may change the options of the nodes.
//   - ClusterSlots: a topology that the servers do not know.
//   - ReplicaOnly: locks cannot be taken on replicas. ReadOnly of UniversalOptions with a MasterName
//     means the same.
//
// CredentialsProvider, CredentialsProviderContext and StreamingCredentialsProvider are refused with
// sentinels, which would get these credentials as well.
//
// # Fields without effect
//
//   - MaxRetries, MinRetryBackoff, MaxRetryBackoff, MaxRedirects: no request is sent twice by the
//     connection. redlatch repeats what can be repeated, and follows redirections.
//   - DialerRetries, DialerRetryTimeout, DialerRetryBackoff, FailingTimeoutSeconds: redlatch.New makes one
//     attempt, and a lost connection is restored whenever that is possible.
//   - WriteTimeout: ReadTimeout includes the time of writing.
//   - ContextTimeoutEnabled: every call ends with its context.
//   - ReadBufferSize, WriteBufferSize, PipelineReadBufferSize, PipelineWriteBufferSize, PipelinePoolSize,
//     AutoPipelineOptions: sizes for the traffic of go-redis. Requests for locks are small, and
//     concurrent ones are sent together.
//   - PoolFIFO, PoolSize, PoolTimeout, MaxConcurrentDials, MinIdleConns, MaxIdleConns, MaxActiveConns,
//     ConnMaxIdleTime, ConnMaxLifetimeJitter: there is no pool. A server has one connection for requests,
//     one for messages, and usually one for renewals.
//   - ReadOnly, RouteByLatency, RouteByLatencyTolerance, RouteRandomly, UseDisconnectedReplicas, ShardPicker,
//     DisableRoutingPolicies: all requests go to the primary that has the key.
//   - Limiter: a refused renewal would lose a lock, and a refused release would keep it from others.
//   - IdentitySuffix: part of the name of go-redis, which is not the library that connects.
//   - NodeAddress, PushNotificationProcessor, MaintNotificationsConfig, UnstableResp3: redlatch takes no part
//     in maintenance that a server announces. It reconnects when the server ends a connection.
//   - ClientSideCache, ClientSideCacheConfig, ClientSideCacheStrategy, ClientSideCacheCoalesceMisses,
//     ClientSideCacheInvalidationBatchWindow, ClientSideCacheRefreshOnInvalidate: locks are never cached.
package goredis
