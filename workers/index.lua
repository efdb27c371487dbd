#!lua name=@LIBRARY@
-- The KV index. All keys of one store share one hash tag, so that the budget of a tenant and that of the whole
-- store are kept by one atomic call. Bytes never come here.
--
-- kv:{S}:T:b:ID   string  "OBJECT:POSITION", the segment that holds block ID, and where in it (from 0)
-- kv:{S}:T:o:OBJ  hash    st W|R, bytes, first (blocks before it), par (block before it), ids, exp (ms)
-- kv:{S}:T:lru    zset    OBJECT by last use; a parent is never older than its children, so tails go first
-- kv:{S}:T:use    hash    bytes, segments: charged at begin, refunded at abort, gone, evict and purge
-- kv:{S}:lru, kv:{S}:use  the same for the whole store; members are "T:OBJECT"
-- kv:{S}:due      zset    "T:OBJECT:BYTES" by deadline of writing, then by end of life
-- kv:{S}:up       string  present while the index knows what lies on disk
-- kv:{S}:T:c:ID   string  owner of a claim

local SLACK_MS = 86400000
local ID = 16
local MAX_VICTIMS = 256

local function now_ms()
  local t = redis.call('TIME')
  return t[1] * 1000 + math.floor(t[2] / 1000)
end

-- The safety net: every key ends by itself, later than the sweeper would have ended it.
local function outlive(key, ms)
  if redis.call('PEXPIRE', key, ms, 'GT') == 0 and redis.call('PTTL', key) == -1 then
    redis.call('PEXPIRE', key, ms)
  end
end

local function charge(use, bytes, segments)
  redis.call('HINCRBY', use, 'segments', segments)
  if redis.call('HINCRBY', use, 'bytes', bytes) <= 0 then
    redis.call('DEL', use)
  end
end

local function refund(store, tag, bytes)
  charge(store .. ':use', -bytes, -1)
  charge(store .. ':' .. tag .. ':use', -bytes, -1)
end

local function drop(store, tag, obj)
  local base = store .. ':' .. tag
  local key = base .. ':o:' .. obj
  local f = redis.call('HMGET', key, 'bytes', 'ids')
  if not f[1] then return nil end
  for at = 1, #f[2], ID do
    local block = base .. ':b:' .. string.sub(f[2], at, at + ID - 1)
    local held = redis.call('GET', block)
    if held and string.sub(held, 1, #obj) == obj then redis.call('DEL', block) end
  end
  redis.call('DEL', key)
  redis.call('ZREM', base .. ':lru', obj)
  redis.call('ZREM', store .. ':lru', tag .. ':' .. obj)
  redis.call('ZREM', store .. ':due', tag .. ':' .. obj .. ':' .. f[1])
  local bytes = tonumber(f[1])
  refund(store, tag, bytes)
  return bytes
end

local function at_block(base, id)
  local held = redis.call('GET', base .. ':b:' .. id)
  if not held then return nil end
  local cut = string.find(held, ':', 1, true)
  return string.sub(held, 1, cut - 1), tonumber(string.sub(held, cut + 1))
end

-- Microseconds of last use, less one for each block before it: a child is always older than its parent.
local function score_of(first)
  local t = redis.call('TIME')
  return string.format('%.0f', t[1] * 1000000 + t[2] - first)
end

local function touch(store, tag, obj, first)
  local score = score_of(first)
  redis.call('ZADD', store .. ':' .. tag .. ':lru', 'XX', 'GT', score, obj)
  redis.call('ZADD', store .. ':lru', 'XX', 'GT', score, tag .. ':' .. obj)
end

-- Touch the segments from block `id` back to the chain's start; returns them as a set.
local function touch_path(store, tag, id)
  local base, seen = store .. ':' .. tag, {}
  while id and id ~= '' do
    local obj = at_block(base, id)
    if not obj or seen[obj] then break end
    local f = redis.call('HMGET', base .. ':o:' .. obj, 'first', 'par')
    if not f[1] then break end
    seen[obj] = true
    touch(store, tag, obj, tonumber(f[1]))
    id = f[2]
  end
  return seen
end

local function sweep(store, now, most)
  local gone = {}
  for _, member in ipairs(redis.call('ZRANGEBYSCORE', store .. ':due', '-inf', now, 'LIMIT', 0, most)) do
    local tag, obj, bytes = string.match(member, '^(%x+):(%x+):(%d+)$')
    if drop(store, tag, obj) == nil then refund(store, tag, tonumber(bytes)) end
    redis.call('ZREM', store .. ':due', member)
    gone[#gone + 1] = tag .. ':' .. obj
  end
  return gone
end

-- keys: store. args: tag, ids. Returns blocks matched, then OBJECT, blocks used, blocks, bytes for each segment in order.
local function match(keys, args)
  local store, tag, ids = keys[1], args[1], args[2]
  local base, now = store .. ':' .. tag, now_ms()
  local function id(n) return string.sub(ids, (n - 1) * ID + 1, n * ID) end
  local low, high = 0, #ids / ID
  if high > 0 and redis.call('EXISTS', base .. ':b:' .. id(high)) == 1 then low = high end
  while low < high do
    local middle = math.ceil((low + high) / 2)
    if redis.call('EXISTS', base .. ':b:' .. id(middle)) == 1 then low = middle else high = middle - 1 end
  end
  -- Walk back over whole segments. A hole (lost or expired segment) makes the prefix before it the best so far.
  local found, at, best = {}, low, low
  while at > 0 do
    local obj, position = at_block(base, id(at))
    local f = obj and redis.call('HMGET', base .. ':o:' .. obj, 'st', 'bytes', 'ids', 'exp', 'first')
    if f and f[1] == 'R' and tonumber(f[4]) > now then
      table.insert(found, 1, {obj, position + 1, #f[3] / ID, tonumber(f[2]), tonumber(f[5])})
      at = at - position - 1
    else
      found, at = {}, at - 1
      best = at
    end
  end
  local reply = {best}
  for _, s in ipairs(found) do
    touch(store, tag, s[1], s[5])
    for i = 1, 4 do reply[#reply + 1] = s[i] end
  end
  return reply
end

-- keys: store. args: tag, obj, bytes, first, par, ids, life ms, tenant limit, store limit, deadline ms.
-- Returns status, then the victims as TAG:OBJECT. Status: ok | have | orphan | full.
local function begin(keys, args)
  local store, tag, obj, bytes, first, par, ids = keys[1], args[1], args[2], tonumber(args[3]), args[4], args[5], args[6]
  local life, tenant_limit, store_limit, deadline = tonumber(args[7]), tonumber(args[8]), tonumber(args[9]), tonumber(args[10])
  local base, now = store .. ':' .. tag, now_ms()
  local key = base .. ':o:' .. obj
  if redis.call('EXISTS', key) == 1 then return {'have'} end
  local reply = {'ok'}
  for _, member in ipairs(sweep(store, now, MAX_VICTIMS)) do reply[#reply + 1] = member end
  local new = 0
  for at = 1, #ids, ID do
    if redis.call('EXISTS', base .. ':b:' .. string.sub(ids, at, at + ID - 1)) == 0 then new = new + 1 end
  end
  if new == 0 then reply[1] = 'have'
  elseif par ~= '' and redis.call('EXISTS', base .. ':b:' .. par) == 0 then reply[1] = 'orphan'
  elseif bytes > tenant_limit or bytes > store_limit then reply[1] = 'full' end
  if reply[1] ~= 'ok' then return reply end
  local keep = touch_path(store, tag, par)
  local function make_room(use, lru, limit, prefix)
    while tonumber(redis.call('HGET', use, 'bytes') or 0) + bytes > limit do
      local oldest = redis.call('ZRANGE', lru, 0, 0)[1]
      if not oldest or #reply > MAX_VICTIMS * 2 then return false end
      local t, o = string.match(prefix .. oldest, '^(%x+):(%x+)$')
      if t == tag and keep[o] then return false end
      if drop(store, t, o) == nil then redis.call('ZREM', lru, oldest) end
      reply[#reply + 1] = t .. ':' .. o
    end
    return true
  end
  if not make_room(base .. ':use', base .. ':lru', tenant_limit, tag .. ':')
    or not make_room(store .. ':use', store .. ':lru', store_limit, '') then
    reply[1] = 'full'
    return reply
  end
  redis.call('HSET', key, 'st', 'W', 'bytes', args[3], 'first', first, 'par', par, 'ids', ids, 'exp', now + life)
  redis.call('PEXPIRE', key, life + SLACK_MS)
  redis.call('ZADD', store .. ':due', now + deadline, tag .. ':' .. obj .. ':' .. args[3])
  for _, use in ipairs({store .. ':use', base .. ':use'}) do
    charge(use, bytes, 1)
    outlive(use, life + SLACK_MS)
  end
  outlive(store .. ':due', life + SLACK_MS)
  return reply
end

-- keys: store. args: tag, obj. Returns ok | have | lost | orphan; in the last three the caller deletes its file.
local function commit(keys, args)
  local store, tag, obj = keys[1], args[1], args[2]
  local base, now = store .. ':' .. tag, now_ms()
  local key = base .. ':o:' .. obj
  local f = redis.call('HMGET', key, 'st', 'bytes', 'first', 'par', 'ids', 'exp')
  if not f[1] then return 'lost' end
  if f[1] == 'R' then return 'ok' end
  if f[4] ~= '' and redis.call('EXISTS', base .. ':b:' .. f[4]) == 0 then
    drop(store, tag, obj)
    return 'orphan'
  end
  local life, new = tonumber(f[6]) - now, 0
  if life <= 0 then
    drop(store, tag, obj)
    return 'lost'
  end
  for at = 1, #f[5], ID do
    local block = base .. ':b:' .. string.sub(f[5], at, at + ID - 1)
    if redis.call('SET', block, obj .. ':' .. (at - 1) / ID, 'NX', 'PX', life + SLACK_MS) then new = new + 1 end
  end
  if new == 0 then
    drop(store, tag, obj)
    return 'have'
  end
  redis.call('HSET', key, 'st', 'R')
  local member = tag .. ':' .. obj
  redis.call('ZADD', store .. ':due', f[6], member .. ':' .. f[2])
  local score = score_of(tonumber(f[3]))
  redis.call('ZADD', base .. ':lru', score, obj)
  redis.call('ZADD', store .. ':lru', score, member)
  for _, lru in ipairs({base .. ':lru', store .. ':lru'}) do outlive(lru, life + SLACK_MS) end
  touch_path(store, tag, f[4])
  return 'ok'
end

-- keys: store. args: tag, obj. For a write that failed (abort) and for a payload that is lost (gone). Returns bytes.
local function forget(keys, args)
  return drop(keys[1], args[1], args[2]) or 0
end

-- keys: store. args: tag, last block's id of a path that was used without `match`.
local function used(keys, args)
  touch_path(keys[1], args[1], args[2])
  return 1
end

-- keys: store. Drops what is past its time; at most args[1]. Returns TAG:OBJECT of each.
local function tidy(keys, args)
  return sweep(keys[1], now_ms(), tonumber(args[1]))
end

-- keys: store. args: tag, most. Returns segments and bytes dropped; call again until it says 0.
local function purge(keys, args)
  local store, tag = keys[1], args[1]
  local count, bytes = 0, 0
  for _, obj in ipairs(redis.call('ZRANGE', store .. ':' .. tag .. ':lru', 0, tonumber(args[2]) - 1)) do
    bytes = bytes + (drop(store, tag, obj) or 0)
    redis.call('ZREM', store .. ':' .. tag .. ':lru', obj)
    redis.call('ZREM', store .. ':lru', tag .. ':' .. obj)
    count = count + 1
  end
  if count > 0 then return {count, bytes} end
  -- What is left is being written: its commit will find nothing.
  for _, member in ipairs(redis.call('ZRANGE', store .. ':due', 0, -1)) do
    local t, obj = string.match(member, '^(%x+):(%x+):%d+$')
    if t == tag then drop(store, tag, obj) end
  end
  return {0, 0}
end

-- keys: store. args: tag, then objects. Returns 1 or 0 for each: does the index know it (also while it is written)?
local function known(keys, args)
  local reply = {}
  for i = 2, #args do reply[i - 1] = redis.call('EXISTS', keys[1] .. ':' .. args[1] .. ':o:' .. args[i]) end
  return reply
end

-- keys: the claim. args: owner. Returns 1 when the claim was the owner's, and is now nobody's.
local function release(keys, args)
  if redis.call('GET', keys[1]) ~= args[1] then return 0 end
  return redis.call('DEL', keys[1])
end

redis.register_function('@LIBRARY@_match', match)
redis.register_function('@LIBRARY@_begin', begin)
redis.register_function('@LIBRARY@_commit', commit)
redis.register_function('@LIBRARY@_forget', forget)
redis.register_function('@LIBRARY@_used', used)
redis.register_function('@LIBRARY@_tidy', tidy)
redis.register_function('@LIBRARY@_purge', purge)
redis.register_function('@LIBRARY@_known', known)
redis.register_function('@LIBRARY@_release', release)
